"""Which message a chat template writes text for: its program, changed to put marks around everything it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

OWNER, LEAVE = "kvweave_owner", "kvweave_leave"
"""Variables of a changed template: ``OWNER(generating, *candidates)`` gives the mark in front of a text whose owner is the
first candidate that is a message, ``LEAVE`` is the one behind it."""

_FLAG = "add_generation_prompt"
_SOURCE = "kvweave_source_of_"


def attributed(template: nodes.Template) -> nodes.Template:
    """``template`` with marks around every output; changes the nodes it is given."""
    changed: nodes.Template = _Marking().visit(template)
    return changed


class _Marking(NodeTransformer):
    """Text belongs to the message of the innermost loop over messages, or is the generation prompt's.

    Captured text (macros, ``set`` blocks) is marked only by loops inside it: it's owned where it is written out.
    """

    def __init__(self) -> None:
        # By loop, the names that may hold its message: its target, then what its body sets (``message = messages[i]``).
        self._loops: list[list[str]] = []
        self._captured = False
        self._generating = False
        self._sources: set[str] = set()  # set from one message outside all loops: ``first = messages[0]['content']``

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._loops.append([node.target.name] if isinstance(node.target, nodes.Name) else [])
        node.body = self._all(node.body)
        self._loops.pop()
        node.else_ = self._all(node.else_)
        return node

    def visit_If(self, node: nodes.If) -> nodes.Node:
        flags = set(_flags(node.test))
        node.body = self._all(node.body, generating=False in flags)
        node.elif_ = self._all(node.elif_)
        node.else_ = self._all(node.else_, generating=True in flags)
        return node

    def visit_Assign(self, node: nodes.Assign) -> Any:
        if not isinstance(node.target, nodes.Name) or self._captured:
            return node
        name = node.target.name
        if self._loops:
            self._loops[-1].append(name)
            return node
        messages = _single_messages(node.node)
        if not messages:
            return node
        self._sources.add(name)
        source = nodes.Assign(nodes.Name(_SOURCE + name, "store"), messages[0]).set_lineno(node.lineno)
        return [source, node]

    def visit_Output(self, node: nodes.Output) -> Any:
        changed: list[nodes.Node] = []
        for generating, group in groupby(node.nodes, self._is_generating):
            part = nodes.Output(list(group)).set_lineno(node.lineno)
            changed += self._marked(part, generating)
        return changed

    def visit_CallBlock(self, node: nodes.CallBlock) -> Any:
        return self._marked(self._capture(node), self._generating)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> Any:
        return self._marked(self._capture(node), self._generating)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        return self._capture(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._capture(node)

    def _all(self, body: Sequence[nodes.Node], generating: bool = False) -> list[Any]:
        before, self._generating = self._generating, self._generating or generating
        changed: list[nodes.Node] = []
        for node in body:
            new = self.visit(node)
            changed += new if isinstance(new, list) else [new]
        self._generating = before
        return changed

    def _capture(self, node: Any) -> nodes.Node:
        before = self._loops, self._captured, self._generating
        self._loops, self._captured, self._generating = [], True, False
        node.body = self._all(node.body)
        self._loops, self._captured, self._generating = before
        return node

    def _is_generating(self, node: nodes.Node) -> bool:
        return self._generating or any(False in _flags(n.test) for n in _walk(node) if isinstance(n, nodes.CondExpr))

    def _marked(self, node: nodes.Node, generating: bool) -> list[nodes.Node]:
        if not (self._loops or generating) and self._captured:
            return [node]
        flag: nodes.Expr = nodes.Name(_FLAG, "load") if generating else nodes.Const(False)
        call = nodes.Call(nodes.Name(OWNER, "load"), [flag, *self._candidates(node)], [], None, None)
        marks = nodes.Output([call]), nodes.Output([nodes.Name(LEAVE, "load")])
        begin, leave = (m.set_lineno(node.lineno) for m in marks)
        return [begin, node, leave]

    def _candidates(self, node: nodes.Node) -> list[nodes.Expr]:
        if self._loops:
            return [nodes.Name(name, "load") for names in reversed(self._loops) for name in dict.fromkeys(names)]
        read = [n.name for n in _walk(node) if isinstance(n, nodes.Name) and n.name in self._sources]
        return [nodes.Name(_SOURCE + name, "load") for name in read] + _single_messages(node)


def _walk(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    yield from node.find_all(nodes.Node)


def _flags(test: nodes.Node, negated: bool = False) -> Iterator[bool]:
    """For each time a condition reads the flag: whether it does so negated."""
    if isinstance(test, nodes.Name) and test.name == _FLAG:
        yield negated
    for child in test.iter_child_nodes():
        yield from _flags(child, negated != isinstance(test, nodes.Not))


def _single_messages(node: nodes.Node) -> list[nodes.Expr]:
    """``messages[0]`` and the like in an expression."""
    return [
        n
        for n in _walk(node)
        if isinstance(n, nodes.Getitem)
        and isinstance(n.arg, nodes.Const)
        and isinstance(n.arg.value, int)
        and isinstance(n.node, nodes.Name)
        and "messages" in n.node.name
    ]
