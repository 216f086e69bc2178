"""The rows of several processes: two checkouts by turns, queue against engine, ten nodes."""

import asyncio
import statistics
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from first_minute import processes
from rows import groups
from rows.groups import Figures

#: Slices of each checkout, by turns.
PAIRS = 6

#: Seconds of a slice, and of another row of `rows/engine.py`.
SLICE_SECONDS, TINY_SECONDS = 10.0, 2.0

#: A row of a process that hangs is given up.
HANG_SECONDS = 200.0

#: GB of the cards that ten nodes stand for, so many at a time as the GPU holds together.
MEMORIES = ((16, 18, 20, 22, 24), (17, 19, 21, 23, 25))

#: Until they all draw at full speed.
NODE_SECONDS = 150.0

#: The script that measures rows of an engine, in either checkout.
SCRIPTS = ("benchmarks/rows/engine.py", "benchmarks/engine_rows.py")

ROOT = Path(__file__).parents[2]

Emit = Callable[..., None]


def uniform_over_before(emit: Emit, arguments: Namespace) -> None:
    asyncio.run(_compare_checkouts(emit, arguments))


def four_steps(emit: Emit, arguments: Namespace) -> None:
    """Four unguided steps: the engine alone, and a worker 300 ms away from its storage."""
    rows = {"four_steps_engine": "engine", "four_steps": "worker"}
    asyncio.run(_measure_group(emit, arguments, "few_steps", rows))


def company(emit: Emit, arguments: Namespace) -> None:
    """An image beside others with LoRAs of all kinds against the same image alone."""
    asyncio.run(_measure_group(emit, arguments, "company", {"company": "company"}))


def unlike_memory(emit: Emit, arguments: Namespace) -> None:
    """Nodes with unlike free memory, which all find the packages of the row `uniform`."""
    asyncio.run(_start_nodes(emit, arguments))


async def _compare_checkouts(emit: Emit, arguments: Namespace) -> None:
    if arguments.before is None:
        raise SystemExit("--before FOLDER is needed: a checkout of commit 2ad5d2b6")
    trees = {"before": arguments.before, "now": ROOT}
    begun: dict[str, groups.Group] = {}
    pairs: list[dict[str, float]] = []
    try:
        for name, tree in trees.items():
            begun[name] = await _start(arguments, tree, "engine", name)
        await asyncio.gather(*(each.wait_until_ready() for each in begun.values()))
        for pair in range(PAIRS):
            order = list(trees) if pair % 2 else list(trees)[::-1]
            rates = {
                name: await _measure(arguments, begun[name], "mixed") for name in order
            }
            pairs.append({name: rates[name]["images_per_second"] for name in trees})
            ratios = [each["now"] / each["before"] for each in pairs]
            emit(pairs=pairs, uniform_over_before=statistics.median(ratios))
        emit(is_complete=True)
    finally:
        await asyncio.gather(*(each.end() for each in begun.values()))


async def _measure_group(
    emit: Emit, arguments: Namespace, name: str, rows: dict[str, str]
) -> None:
    group = await _start(arguments, ROOT, name, name)
    try:
        await group.wait_until_ready()
        for row, prefix in rows.items():
            found = await _measure(arguments, group, row)
            emit(**{f"{prefix}_{key}": value for key, value in found.items()})
        emit(is_complete=True)
    finally:
        await group.end()


async def _start(
    arguments: Namespace, tree: Path, group: str, folder: str
) -> groups.Group:
    found = [tree / each for each in SCRIPTS if (tree / each).exists()]
    told = [str(arguments.folder / "groups" / folder), "--builder", group]
    told += ["--device", arguments.device] + ["--tiny"] * arguments.tiny
    told += ["--slots", str(arguments.slots)] if arguments.slots else []
    return await groups.Group.start(found[0].resolve(), group, *told)


async def _measure(arguments: Namespace, group: groups.Group, row: str) -> Figures:
    seconds = TINY_SECONDS if arguments.tiny else SLICE_SECONDS
    found = await group.measure(row, seconds, HANG_SECONDS)
    if "error" in found:
        raise SystemExit(f"{row}: {found['error']}")
    return found


async def _start_nodes(emit: Emit, arguments: Namespace) -> None:
    nodes: list[Figures] = []
    for memories in [MEMORIES[0][:2]] if arguments.tiny else MEMORIES:
        starting = [
            _node(arguments, None if arguments.tiny else memory) for memory in memories
        ]
        nodes += await asyncio.gather(*starting)
        compiled = [node.get("graphs_compiled") for node in nodes]
        if None not in compiled:
            emit(nodes=nodes, graphs_compiled=max(compiled, default=None))
    emit(nodes=nodes, is_complete=all(node.get("is_complete") for node in nodes))


async def _node(arguments: Namespace, memory: int | None) -> Figures:
    figures: Figures = {}
    told = processes.command("unlike", arguments, memory=memory)
    async for found in processes.figures_of(told, NODE_SECONDS):
        figures |= found
    return figures
