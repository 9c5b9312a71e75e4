"""Join a trace of jax's profiler with lines of train_gpt.py: where does the time of a step go?

`bench.py --profile DIR` writes traces of some steps of each stage to DIR/NAME. `keep_lines` writes
DIR/lines.json: a list with one object per kernel of a program, the longest first.

    trace        NAME: the program with gradients of these steps, such as grads0
    devices      their number and kind
    program      contains the kernel: grads0, anvil, adam_tied, tables0-0 and others
    function     innermost function of train_gpt.py; "other" if unknown
    line         line in train_gpt.py; 0 if unknown
    kernel       name in the trace
    ms_per_step  time per step and device, with the step's share of updates
    count        executions per step and device

The time of a trace is the sum of all kernels. Kernels that run at the same time both count. On
CPUs the time of collectives includes waiting for other devices.
"""

import itertools
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import jax
from preflight import hlo_computations, place_of, places

# Platform -> how the names of planes and of lines in a trace begin that show executed kernels.
EXECUTED = {
    "cpu": ("/host:CPU", ""),
    "gpu": ("/device:GPU", "Stream"),
    "tpu": ("/device:TPU", "XLA Ops"),
}
OUTER = "while", "call", "conditional"  # the instructions inside these have times of their own
LONGEST = 20  # lines that `describe` prints


def executed(folder: Path, platform: str):
    """Yield (kernel, instruction, module, milliseconds) of everything that devices executed in the
    newest trace in `folder`. The instruction and the module are "" if the trace lacks them."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    of_plane, of_line = EXECUTED[platform]
    for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
        if not plane.name.startswith(of_plane):
            continue
        for line in plane.lines:
            for event in line.events if line.name.startswith(of_line) else ():
                facts = dict(event.stats)
                if platform == "cpu" and "hlo_op" not in facts:
                    continue  # Python, or the runtime
                kernel = event.name.split(" = ")[0].lstrip("%")  # TPUs give the full instruction
                module = facts.get("hlo_module", "").split("(")[0]
                yield kernel, facts.get("hlo_op", ""), module, event.duration_ns / 1e6


def kernel_name(instruction: str) -> str:
    """Return the name that GPU compilers give to the kernel of an instruction."""
    return re.sub(r"[.\-]", "_", instruction)


def spots(text: str) -> dict[str, tuple | None]:
    """Return `kernel_name` -> (function, line) for the instructions of an optimized program; None
    for OUTER."""
    innermost = places(text)
    found = {}
    computations, _ = hlo_computations(text)
    for one in itertools.chain(*(scope.values() for scope in computations.values())):
        if not one.fused:
            spot = None if one.op in OUTER else place_of(one, innermost)
            found[kernel_name(one.name)] = spot
    return found


def spot_of(kernel: str, instruction: str, known: dict) -> tuple | None:
    """Return (function, line) of a kernel by the `spots` of its program; None for OUTER."""
    own = known.get(kernel_name(kernel), ("other", 0))
    # A GPU can start many kernels together: then all have the instruction that starts them.
    return own and (known.get(kernel_name(instruction)) or own)


def keep_lines(folder: Path, traced: dict, compiled: dict, mesh) -> list[dict]:
    """Write lines.json for the traces in `folder`; return its contents. `traced` maps the name of a
    trace to (number of steps, keys of their programs); `compiled` maps keys to executables."""
    texts = {str(key): compiled[key].as_text() for _, keys in traced.values() for key in keys}
    known = {program: spots(text) for program, text in texts.items()}
    by_module = {re.match(r"HloModule ([^,\s]+)", text)[1]: x for x, text in texts.items()}
    device = mesh.devices.flat[0]
    rows = []
    for trace, (steps, keys) in traced.items():
        times = defaultdict(list)
        for kernel, instruction, module, ms in executed(folder / trace, device.platform):
            programs = [by_module[module]] if module in by_module else [str(key) for key in keys]
            named = (x for x in programs if kernel_name(kernel) in known[x])
            program = next(named, programs[0])
            if spot := spot_of(kernel, instruction, known[program]):
                times[program, *spot, kernel].append(ms)
        shares = steps * mesh.size
        for (program, function, line, kernel), each in times.items():
            row = {"trace": trace, "devices": f"{mesh.size} x {device.device_kind}"}
            row |= {"program": program, "function": function, "line": line, "kernel": kernel}
            rows.append(row | {"ms_per_step": sum(each) / shares, "count": len(each) / shares})
    rows.sort(key=lambda row: -row["ms_per_step"])
    (folder / "lines.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def describe(trace: str, rows: list[dict]) -> str:
    """Return the programs of a trace, and the lines that take the most time, as text."""
    programs, lines = Counter(), Counter()
    for row in rows:
        if row["trace"] == trace:
            programs[row["program"]] += row["ms_per_step"]
            lines[f"line {row['line']}, {row['function']}"] += row["ms_per_step"]
    text = [f"{trace}, ms per step by program and by line:"]
    for name, ms in [*programs.items(), *lines.most_common(LONGEST)]:
        text.append(f"{ms:>11.3f}  {name}")
    return "\n".join(text)
