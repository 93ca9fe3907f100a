"""Who runs in the next step, and who is started next."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvweave.engine.scheduler import Scheduler, Verdict


@dataclass(eq=False)
class Job:
    pending_rows: int
    ready: bool = True
    tenant: str = ""
    places: int = 1

    @property
    def num_prompt(self) -> int:
        return self.pending_rows


def scheduler_of(jobs: list[Job], **options: int) -> Scheduler[Job]:
    scheduler: Scheduler[Job] = Scheduler(10, **options)
    for job in jobs:
        scheduler.add(job)
    return scheduler


def start(job: Job) -> Verdict:
    return Verdict.STARTED


def test_what_waits_for_loads_stays_out_while_others_run() -> None:
    jobs = [Job(5, ready=False), Job(1), Job(6)]
    scheduler = scheduler_of(jobs)
    scheduler.admit(start)
    assert scheduler.schedule() == [jobs[1], jobs[2]]
    for job in jobs[1:]:
        scheduler.remove(job)
    assert scheduler.schedule() == [jobs[0]]  # nothing else to do: the step itself waits


def test_decodes_always_join_and_one_prefill_always_runs() -> None:
    jobs = [Job(50), Job(1), Job(8), Job(1)]
    scheduler = scheduler_of(jobs)
    scheduler.admit(start)
    assert scheduler.schedule() == [jobs[1], jobs[3], jobs[0]]  # a prefill as large as the step isn't overtaken
    for job in jobs[1:]:
        scheduler.remove(job)
    assert scheduler.schedule() == [jobs[0]]


def test_nobody_takes_the_room_that_another_waits_for() -> None:
    jobs = [Job(9), Job(1)]
    scheduler = scheduler_of(jobs)
    scheduler.admit(lambda job: Verdict.STARTED if job.pending_rows == 1 else Verdict.NO_ROOM)
    assert not scheduler.running
    assert list(scheduler.waiting) == jobs


def test_who_waits_for_the_caches_is_overtaken() -> None:
    jobs = [Job(9), Job(1)]
    scheduler = scheduler_of(jobs)
    scheduler.admit(lambda job: Verdict.LATER if job is jobs[0] else Verdict.STARTED)
    assert scheduler.running == [jobs[1]]
    scheduler.admit(start)
    assert scheduler.running == [jobs[1], jobs[0]]


def test_tenants_take_turns_however_much_one_of_them_asks() -> None:
    greedy = [Job(5, tenant="greedy") for _ in range(6)]
    modest = [Job(5, tenant="modest") for _ in range(2)]
    order: list[str] = []

    def note(job: Job) -> Verdict:
        order.append(job.tenant)
        return Verdict.STARTED

    scheduler_of([*greedy, *modest]).admit(note)
    assert order[:4] in (["greedy", "modest"] * 2, ["modest", "greedy"] * 2)
    assert order[4:] == ["greedy"] * 4


def test_who_was_away_has_no_credit() -> None:
    scheduler = scheduler_of([Job(100, tenant="a"), Job(100, tenant="a")])
    scheduler.admit(start)
    late = [Job(1, tenant="b") for _ in range(3)]
    for job in (*late, Job(1, tenant="a")):
        scheduler.add(job)
    order: list[str] = []

    def note(job: Job) -> Verdict:
        order.append(job.tenant)
        return Verdict.STARTED

    scheduler.admit(note)
    assert order.index("a") <= 1, "b starts level with a, not 200 tokens ahead"


def test_the_limit_of_sequences_counts_samples() -> None:
    jobs = [Job(1, places=3), Job(1, places=2), Job(1)]
    scheduler = scheduler_of(jobs, max_sequences=4)
    scheduler.admit(start)
    assert scheduler.running == [jobs[0]]
    scheduler.remove(jobs[0])
    scheduler.admit(start)
    assert scheduler.running == [jobs[1], jobs[2]]
    alone = scheduler_of([Job(1, places=9)], max_sequences=4)
    alone.admit(start)
    assert alone.running, "what is larger than the limit runs alone"


def test_preempted_ones_go_first() -> None:
    jobs = [Job(5, tenant="a"), Job(5, tenant="b")]
    scheduler = scheduler_of(jobs)
    scheduler.admit(start)
    scheduler.add(Job(5, tenant="c"))
    scheduler.preempt(jobs[0])
    began: list[Job] = []

    def note(job: Job) -> Verdict:
        began.append(job)
        return Verdict.STARTED

    scheduler.admit(note)
    assert began[0] is jobs[0]


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abc"), st.booleans()), max_size=20), st.integers(1, 40))
def test_everybody_runs_in_the_end(asked: list[tuple[int, str, bool]], most: int) -> None:
    jobs = [Job(rows, ready=ready, tenant=tenant) for rows, tenant, ready in asked]
    scheduler: Scheduler[Job] = Scheduler(most, max_sequences=3)
    for job in jobs:
        scheduler.add(job)
    done: list[Job] = []
    for _ in range(len(jobs) + 1):
        scheduler.admit(start)
        for job in scheduler.schedule():
            scheduler.remove(job)
            done.append(job)
    assert scheduler.idle
    assert {id(j) for j in done} == {id(j) for j in jobs}
