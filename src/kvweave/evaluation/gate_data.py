"""Questions over passages, for the quality gate where the user has no data: everything in them is invented.

Each prompt has a small world of its own: a market town and a port, an engineer and the bridge he built, a museum, the ship
it shows, a festival. The passages refer to each other, and half of the questions need two of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvweave.evaluation.datasets import Example

NUM_PROMPTS = 32
_FEWEST, _MOST = 3, 6  # documents in a prompt
_COLOUR = 7  # sentences beside the facts


@dataclass(frozen=True)
class _Passage:
    """``facts`` are always there, in this order; a few sentences of ``colour`` stand between them."""

    title: str
    facts: tuple[str, ...]
    colour: tuple[str, ...]


@dataclass(frozen=True)
class _Question:
    text: str
    answer: str
    needs: tuple[str, ...]


_INSTRUCTIONS = (
    "Answer in one or two full sentences, using the passages above.",
    "Answer from the passages above, and say which facts the answer rests on.",
    "Answer the question from the passages above, with a few words and nothing else.",
)

_QUESTIONS = (
    _Question("Who built {bridge}, and how long is it?", "{length} metres", ("bridge",)),
    _Question("In which town was the builder of {bridge} born?", "{port}", ("bridge", "engineer")),
    _Question("From whom did {town} receive its charter, and in which year?", "{charter}", ("town",)),
    _Question("How many years before the first {festival} was the fire that it recalls?", "{waited}", ("festival", "town")),
    _Question("What was the building of {museum} used for before?", "{former}", ("museum",)),
    _Question("Where was the ship that {museum} shows built?", "{port}", ("museum", "ship")),
    _Question("Tell in short what became of the {ship}.", "a store for nets", ("ship",)),
    _Question("What is the town known for in which the {ship} was built?", "{port_trade}", ("ship", "port")),
    _Question("Describe the life of {engineer}.", "{mentor}", ("engineer",)),
    _Question("Which is longer, {bridge} or the {ship}, and by how much?", "{longer} metres", ("bridge", "ship")),
    _Question("What is eaten at the {festival}, and why?", "{dish}", ("festival",)),
    _Question("On which river does the town lie where {engineer} was born?", "{port_river}", ("engineer", "port")),
)

_PASSAGES: Mapping[str, _Passage] = {
    "town": _Passage(
        "{town}",
        (
            "{town} is a market town on the river {river}, in the hill country three days' ride from the coast.",
            "It received its charter in {charter} from {granter}, with the right to hold a market every {day}.",
            "For three centuries it lived on {trade}, and the guild that ruled the trade kept a court of its own.",
            "On a windy night of {fire} a fire that began in a bakery destroyed {burnt} houses, two thirds of the town.",
            "The streets were laid out anew, wider than before and paved with {stone}, and thatched roofs were forbidden.",
            "At the last census {town} had {people:,} inhabitants, about half as many as in its best years.",
        ),
        (
            "The oldest part lies on a low ridge, where floods don't reach and the wells give water even in dry summers.",
            "A wall with four gates surrounded it once; one gate is left, and swifts nest in its arch every year.",
            "The parish church has a leaning tower, which visitors take for an accident and which its masons had planned.",
            "Travellers complained of the inns, of which there were many, and praised the bread, which was dark and salted.",
            "The council met in the upper room of the weighing house, because it was the only one that could be heated.",
            "In spring the meadows below the town stand under water for some weeks, and children go to school by boat.",
            "The railway came late and stopped on the wrong bank, so that carts went on crossing the river for decades.",
            "Its archive survived because a clerk had carried it home in baskets, against the rules, to copy it in peace.",
            "Two mills still turn, one for flour and one, since the pumps were electrified, for the pleasure of its owner.",
        ),
    ),
    "port": _Passage(
        "{port}",
        (
            "{port} is a harbour town at the mouth of the river {port_river}, known for {port_trade}.",
            "Ships have been built there since {yard}, first on the open beach and then in a yard behind the mole.",
            "At its height the yard employed {men} men, who launched a vessel every six weeks and none on a Friday.",
            "A plate behind the ropewalk points out the house where an engineer was born, and gives the wrong year for it.",
            "A lighthouse of {stone} was lit in {light} and can be seen from a distance of {miles} nautical miles.",
            "When steamers grew too deep for the harbour the shipping lines moved on, and half of the quays fell silent.",
        ),
        (
            "Its streets run down to the water like the fingers of a hand, and the wind comes up each of them in turn.",
            "Fishermen sold their catch from the steps below the customs house, and the price was sung rather than called.",
            "Every family of some standing owned a sixteenth of a ship, so that no storm could ruin one of them alone.",
            "The sailors' chapel is hung with models, among them one of a vessel that was never found again.",
            "Winters are mild and wet; frost comes so seldom that the year of the frozen harbour has a name.",
            "A school of navigation opened above the chandler's shop, with three pupils and a borrowed sextant.",
            "Sand fills the channel every few years, and a dredger that was meant to stay a month has stayed a lifetime.",
            "The old ropewalk is the longest room in the district, and the town's dances are held in it.",
            "On the mole stands a barometer which a captain's widow paid for, with a box for thanks in small coin.",
        ),
    ),
    "engineer": _Passage(
        "{engineer}",
        (
            "{engineer} was an engineer, born in {born} in {port} as the youngest child of a {father}.",
            "At the age of fourteen he was apprenticed to {mentor}, who taught him to draw and to distrust round numbers.",
            "The first work of his own was a row of sluices, which failed in their second year and was rebuilt at his cost.",
            "He is remembered for a bridge in {town}, which he began in {begun} and saw opened in {opened}.",
            "For the bridge he was given the medal of the {academy}, and he wore it, as his letters tell, exactly once.",
            "He died in {died}, with the plans for a second crossing unfinished on his table.",
        ),
        (
            "He kept a diary of the weather and of his debts, and it is the main source for the years of his travels.",
            "Those who worked for him praised that he paid on Saturdays, before the market closed, and never in tokens.",
            "He wrote little; one paper on the scour of river beds was read for longer than anybody had expected.",
            "A quarrel with the surveyor of the district cost him two commissions and gave him time for languages.",
            "He married a teacher of mathematics, who checked his sums and found, by her count, nine errors that mattered.",
            "He turned down a post at the capital because its windows, he said, looked out on nothing that was being built.",
            "In his later years he walked each morning to the nearest building site, whoever owned it, and gave advice.",
            "His drawings were sold by weight after his death, and a printer saved those that are kept today.",
            "A portrait shows him with a folded rule in his hand; the painter had asked for a compass, and he had refused.",
        ),
    ),
    "bridge": _Passage(
        "{bridge}",
        (
            "{bridge} carries the old coast road across the river {river} on the southern side of {town}.",
            "It was built from {begun} to {opened} by the engineer {engineer}, after two wooden bridges had been lost.",
            "It is {length} metres long and stands on {arches} arches of {stone}, the widest of which spans the channel.",
            "The work cost {cost} silver crowns, nearly twice the estimate, because the river bed had no rock to build on.",
            "A flood in {flood} rose to the springing of the arches and took the parapet with it, but not one pier moved.",
            "Tolls were taken in a small house at its northern end until the debt was paid off, a generation later.",
        ),
        (
            "Piles of oak were driven for three summers, while the masons waited and were paid for waiting.",
            "The stone came down the river on rafts, at high water only, so that every dry month set the work back.",
            "On the middle pier a niche was left for a statue that the town voted for, paid for and never agreed upon.",
            "Carters had to lead their horses across, by an order repeated so often that it can't have been obeyed.",
            "Below the third arch a line cut into the stone marks the highest water, with a date that is hard to read.",
            "Its lamps were lit with oil, then with gas; the brackets of both are still there, one above the other.",
            "A lane for walkers was added on the upstream side, on iron arms that rest on the old masonry.",
            "Engineers came from abroad to see the centring, which could be lowered by a single man with a wrench.",
            "Swallows nest under the arches, and repairs are planned around their season.",
        ),
    ),
    "museum": _Passage(
        "{museum}",
        (
            "{museum} in {town} shows how people of the region lived, worked and travelled.",
            "It was founded in {founded} by {founder}, who gave her own collection and the money for its upkeep.",
            "The building had served before as {former}, and hooks and pulleys can still be seen in its ceilings.",
            "Its collection has {objects:,} objects, of which a tenth are on display and the others can be seen on request.",
            "The largest is the {ship}, which was brought up the river on two barges and has a hall of its own.",
            "It opens every day but {day}, which has been the market day for so long that nobody would come.",
        ),
        (
            "The founder wrote the labels herself, and a few are kept as she left them, with their errors and their jokes.",
            "One room is given to tools whose use is no longer known; visitors may leave their guesses in a book.",
            "During the lean years the caretaker grew vegetables in the court and sold tickets from the garden gate.",
            "School classes come in autumn, when the looms are set up and everybody may weave a hand's breadth of cloth.",
            "The roof was renewed with money from a lottery, whose first prize was a pig and whose second was two.",
            "A catalogue was begun three times and has reached, at the last attempt, the letter M.",
            "Its library holds the letters of merchants, pilots and midwives, and is used more than the museum admits.",
            "A clock in the entrance hall runs backwards, a present from a clockmaker who had lost a bet.",
            "What doesn't fit is stored in a barn outside the town, where the larger carts stand in the order of their age.",
        ),
    ),
    "ship": _Passage(
        "The {ship}",
        (
            "The {ship} is a sailing ship of {masts} masts that was launched in {port} in {launched}.",
            "She is {ship_length} metres long, built of oak on frames of elm, and carried {cargo} for most of her life.",
            "Under captain {captain} she reached the southern islands in {days} days, faster than any ship of her size.",
            "In {stranded} she ran onto a sandbank in fog, and was towed off a week later with hardly a plank broken.",
            "After {voyages} voyages she was laid up as a store for nets, and children learned to swim from her deck.",
            "Today she stands under the roof of a museum, far from the sea, with her rigging set up again.",
        ),
        (
            "Her lines were drawn by eye, and when they were measured a century later the two sides differed by an inch.",
            "The crew slept in the forecastle, in bunks so short that tall men were sent to another ship.",
            "She carried a figurehead of a woman with a lantern, which was painted anew before each long voyage.",
            "Her logbooks are complete but for one, which the cook is said to have used to light his stove.",
            "Twice she was sold to pay the debts of her owners, and twice the crew stayed and changed the flag.",
            "Rats never troubled her; sailors gave the credit to a line of cats whose names are in the muster rolls.",
            "Her pumps were worked by hand, a quarter of an hour each watch, and more when she was heavily laden.",
            "A boy who had joined her at twelve sailed on her for forty years and became her last mate.",
            "Shipwrights found, when they opened her up, coins under the mast and a shoe behind the stern post.",
        ),
    ),
    "festival": _Passage(
        "The {festival}",
        (
            "The {festival} is held in {town} in {month} and lasts for three days.",
            "It was first held in {first}, to recall the great fire of the town and those who had put it out.",
            "On the first evening all lights are covered, and a single lantern is carried from {bridge} to the market.",
            "On the second day everybody eats {dish}, because it was all that could be cooked in the ashes.",
            "The last day belongs to a race of water carriers, which has been won {wins} times by the same quarter.",
            "About {guests:,} guests come each year, more than there are beds, and many sleep in barns and boats.",
        ),
        (
            "The lantern is carried by the youngest member of the fire brigade, who must not speak on the way.",
            "Masks were worn in the early years, until a magistrate was ducked in the fountain by persons unknown.",
            "A song of eleven verses is sung, of which most people know the first and pretend to know the others.",
            "It was cancelled only three times, for a flood, for a fever, and for a quarrel about who pays for the bells.",
            "Bakers may not sell on the first day, in memory of the oven in which the fire is said to have begun.",
            "The buckets of the race are of leather, holed in one place, and the hole must not be touched.",
            "Brass bands play from the roofs, which the insurers dislike and the roofers encourage.",
            "Those who moved away come home for it, and most of the town's weddings are agreed upon in these days.",
            "On the morning after it the streets are swept by the council itself, in robes, by a vow never revoked.",
        ),
    ),
}

_TOWNS = ("Arnvik", "Belmora", "Castrel", "Eskarra", "Gravenau", "Holtby", "Istrane", "Jorvale", "Keldan", "Lorwick")
_PORTS = ("Ostrey", "Pellmouth", "Quenby", "Ravnsund", "Selcove", "Tarnhaven", "Ulverey", "Vestmar", "Wickhaven", "Yarlsea")
_RIVERS = (
    "Aldra",
    "Brenn",
    "Cael",
    "Dorva",
    "Elne",
    "Gelda",
    "Hask",
    "Ilme",
    "Jeth",
    "Korra",
    "Lynde",
    "Nerra",
    "Orl",
    "Pask",
)
_FIRST = (
    "Anselm",
    "Bertram",
    "Conrad",
    "Edric",
    "Florian",
    "Gerard",
    "Henrik",
    "Ivo",
    "Jasper",
    "Klement",
    "Oswin",
    "Rupert",
)
_WOMEN = ("Adela", "Brigid", "Clara", "Dorothea", "Elin", "Freda", "Gisela", "Hedwig", "Ingrid", "Johanna", "Lisbet")
_LAST = ("Abeling", "Brandt", "Corvin", "Dahlke", "Ehrlund", "Forster", "Hartwig", "Imbert", "Kessler", "Morren", "Nyberg")
_SHIPS = ("Albatross", "Constance", "Good Hope", "Grey Heron", "Margaret", "Morning Star", "Northern Light", "Sea Thistle")
_CHOICES: Mapping[str, Sequence[str]] = {
    "town": _TOWNS,
    "port": _PORTS,
    "ship": _SHIPS,
    "masts": ("two", "three", "four"),
    "granter": ("Duke Ottokar", "Queen Ysolde", "Bishop Walram", "Countess Mechtild", "King Harald"),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday"),
    "trade": ("wool and dyed cloth", "salt from the upper valley", "tanned leather", "iron wire and nails", "glass beads"),
    "stone": ("red sandstone", "grey granite", "pale limestone", "dark basalt"),
    "port_trade": ("smoked herring", "its rope and sailcloth", "amber and beeswax", "its oyster beds", "tar and turpentine"),
    "father": ("cooper", "pilot", "sailmaker", "lock keeper", "schoolmaster"),
    "academy": ("Academy of Useful Arts", "Society of Rivers and Roads", "Chamber of Builders"),
    "former": ("a grain store", "a barracks", "a convent", "a tobacco works", "a weighing house"),
    "cargo": ("timber and grain", "coal and lime", "coffee and hides", "salt fish", "slate"),
    "month": ("March", "June", "September", "October"),
    "dish": ("baked turnips with salt", "barley soup", "flat rye bread with onions", "chestnut porridge"),
    "festival": ("Lantern Days", "Feast of Buckets", "Ember Fair", "Night of the Bells"),
}


def gate_examples() -> list[Example]:
    """The prompts that kvweave ships: 32, always the same, each with 3 to 6 passages of about 250 words."""
    return [_example(number) for number in range(NUM_PROMPTS)]


def _example(number: int) -> Example:
    chooser = random.Random(f"kvweave gate {number}")
    world = _world(chooser)
    question = _QUESTIONS[number % len(_QUESTIONS)]
    others = [kind for kind in _PASSAGES if kind not in question.needs]
    count = _FEWEST + (number + number // len(_QUESTIONS)) % (_MOST - _FEWEST + 1)
    kinds = [*question.needs, *chooser.sample(others, count - len(question.needs))]
    chooser.shuffle(kinds)
    documents = tuple(_write(_PASSAGES[kind], world, chooser) for kind in kinds)
    instruction = _INSTRUCTIONS[number % len(_INSTRUCTIONS)]
    asked = f"{instruction}\nQuestion: {question.text.format_map(world)}"
    return Example(f"gate:{number + 1}", documents, asked, (question.answer.format_map(world),), "qa")


def _world(chooser: random.Random) -> dict[str, str | int]:
    """Names and numbers that agree with each other wherever they are mentioned."""
    number = chooser.randint
    world: dict[str, str | int] = {name: chooser.choice(values) for name, values in _CHOICES.items()}
    world["river"], world["port_river"] = chooser.sample(_RIVERS, 2)
    first, last = chooser.sample(_FIRST, 3), chooser.sample(_LAST, 4)
    world["engineer"], world["mentor"], world["captain"] = (f"{a} {b}" for a, b in zip(first, last, strict=False))
    world["founder"] = f"{chooser.choice(_WOMEN)} {last[3]}"
    fire, waited = number(1672, 1738), number(2, 29)
    world.update(charter=number(1241, 1419), fire=fire, waited=waited, first=fire + waited, burnt=number(140, 620))
    born = number(1806, 1830)
    begun = born + number(31, 42)
    opened = begun + number(4, 7)
    world.update(born=born, begun=begun, opened=opened, died=opened + number(9, 27), flood=opened + number(6, 30))
    ship_length, longer = number(31, 52), number(41, 160)
    world.update(ship_length=ship_length, longer=longer, length=ship_length + longer)
    launched = number(1848, 1884)
    world.update(launched=launched, stranded=launched + number(5, 19), voyages=number(43, 118), days=number(48, 96))
    world.update(people=number(4100, 18900), guests=number(6000, 29000), objects=number(8200, 61000), wins=number(19, 64))
    world.update(yard=number(1590, 1760), men=number(120, 640), light=number(1821, 1869), miles=number(11, 23))
    world.update(arches=number(4, 11), cost=f"{number(120, 870)},000", founded=number(1926, 1958))
    return world | {"bridge": f"the {world['river']} Bridge", "museum": f"the {world['town']} Museum"}


def _write(passage: _Passage, world: Mapping[str, str | int], chooser: random.Random) -> str:
    """Title and text. The first fact comes first; colour is spread over the others."""
    sentences = list(passage.facts)
    for sentence in chooser.sample(passage.colour, _COLOUR):
        sentences.insert(chooser.randint(1, len(sentences)), sentence)
    written = [_capital(sentence.format_map(world)) for sentence in sentences]
    return f"{_capital(passage.title.format_map(world))}\n{' '.join(written)}"


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
