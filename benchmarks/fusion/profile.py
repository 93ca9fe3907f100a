"""Where the time goes, by kind of work."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

KINDS = {
    "gemm": ("aten::mm", "aten::bmm", "aten::addmm"),
    "softmax": ("aten::_softmax",),
    "copy": ("aten::copy_", "aten::cat", "aten::index_select", "aten::index_copy_", "aten::index"),
    "mask": ("aten::masked_fill_",),
}


def breakdown(run: Callable[[], object]) -> dict[str, float]:
    """Share of the CPU time of ``run`` spent in each kind; ``other`` is element-wise work, calls and Python."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    events = prof.key_averages()
    total = sum(e.self_cpu_time_total for e in events)
    shares = {kind: sum(e.self_cpu_time_total for e in events if e.key in names) / total for kind, names in KINDS.items()}
    return {**shares, "other": 1 - sum(shares.values())}
