"""Where the time of a step goes: a trace of jax's profiler, joined with lines of train_gpt.py.

`bench.py --profile DIR` keeps a trace of some steps of each stage as DIR/NAME, and what
`keep_lines` reads in all of them as DIR/lines.json: a list, longest first, with an object for each
kernel of a program.

    trace        NAME: the gradients of the stage whose steps it has, such as grads0
    devices      how many of which kind
    program      to which the kernel belongs: grads0, anvil, adam_tied, tables0-0 and so on
    kind         "matmuls", "attention", "loss" (the loss but for its matmuls), "links" (what moves
                 between devices, and waits for that) or "rest"
    function     of train_gpt.py, the innermost; "other": not known
    line         there; 0: not known
    kernel       its name in the trace
    ms_per_step  of a step with its share of updates, on a device: the mean of all
    count        how often it is executed in a step, on a device; an update is not in every step

A trace adds up to what devices execute in a step. What runs side by side counts twice; on a CPU so
does the wait of a device for another one, in links.
"""

import itertools
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import jax
from preflight import Instruction, hlo_computations, place_of, places

KINDS = "matmuls", "attention", "loss", "links", "rest"
# Where traces have what devices execute: how names of planes begin, and of lines of these.
EXECUTED = {"cpu": ("/host:CPU", ""), "gpu": ("/device:GPU", "Stream")}
EXECUTED["tpu"] = "/device:TPU", "XLA Ops"
# Kernels of libraries, and ours: the kind by the name, where a trace does not say the instruction.
BY_NAME = {"links": "nccl", "attention": "^attend", "matmuls": "nvjet|gemm|cutlass|xmma"}
OUTER = "while", "call", "conditional"  # instructions in them have times of their own
LONGEST = 12  # lines that are printed of a trace


def executed(folder: Path, platform: str):
    """Yield (kernel, its instruction, its module, milliseconds) of all that devices executed in the
    newest trace in `folder`: names, "" for one that it does not say."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    of_plane, of_line = EXECUTED[platform]
    for plane in jax.profiler.ProfileData.from_file(str(newest)).planes:
        if not plane.name.startswith(of_plane):
            continue
        for line in plane.lines:
            for event in line.events if line.name.startswith(of_line) else ():
                facts = dict(event.stats)
                if platform == "cpu" and "hlo_op" not in facts:
                    continue  # it is what Python does, or the runtime
                kernel = event.name.split(" = ")[0].lstrip("%")  # a TPU names it by its whole text
                module = facts.get("hlo_module", "").split("(")[0]
                yield kernel, facts.get("hlo_op", ""), module, event.duration_ns / 1e6


def kind_of(one: Instruction, function: str) -> str:
    """One of KINDS for an instruction that comes from a function of train_gpt.py."""
    if one.transfer:
        return "links"
    if function.startswith("attend") or re.search('op_name="[^"]*/attend', one.rest):
        return "attention"
    if any(x.op in ("dot", "convolution") for x in (one, *one.contents)):
        return "matmuls"
    if re.search('custom_call_target="[^"]*(gemm|matmul)', one.rest):
        return "matmuls"
    return "loss" if re.search("loss|cross_entropy", function) else "rest"


def kernel_name(instruction: str) -> str:
    """The name of the kernel that a GPU's compiler makes of an instruction."""
    return re.sub(r"[.\-]", "_", instruction)


def spots(text: str) -> dict[str, tuple | None]:
    """{`kernel_name` of an instruction: (kind, function, line)} of an optimized program as text;
    None for OUTER."""
    innermost = places(text)
    found = {}
    for one in itertools.chain(*(scope.values() for scope in hlo_computations(text)[0].values())):
        if not one.fused:
            function, line = place_of(one, innermost)
            spot = kind_of(one, function), function, line
            found[kernel_name(one.name)] = None if one.op in OUTER else spot
    return found


def spot_of(kernel: str, instruction: str, known: dict) -> tuple | None:
    """(kind, function, line) of a kernel by the `spots` of its program; None: it is of OUTER."""
    own = known.get(kernel_name(kernel), ())
    if own is None:
        return None
    # A GPU can start many kernels at once, and they all have the instruction that does this.
    if found := known.get(kernel_name(instruction)) or own:
        return found
    kinds = (kind for kind, names in BY_NAME.items() if re.search(names, kernel))
    return next(kinds, "rest"), "other", 0


def keep_lines(folder: Path, traced: dict, compiled: dict, mesh) -> list[dict]:
    """Write lines.json of the traces in `folder`, and return what is in it. `traced`: {name of a
    trace: (its steps, keys of the programs in them)}; `compiled`: {key: the executable}."""
    texts = {str(key): compiled[key].as_text() for _, keys in traced.values() for key in keys}
    known = {program: spots(text) for program, text in texts.items()}
    by_module = {re.match(r"HloModule ([^,\s]+)", text)[1]: x for x, text in texts.items()}
    device = mesh.devices.flat[0]
    rows = []
    for trace, (steps, keys) in traced.items():
        took = defaultdict(list)
        for kernel, instruction, module, ms in executed(folder / trace, device.platform):
            programs = [by_module[module]] if module in by_module else [str(key) for key in keys]
            named = (x for x in programs if kernel_name(kernel) in known[x])
            program = next(named, programs[0])
            if spot := spot_of(kernel, instruction, known[program]):
                took[program, *spot, kernel].append(ms)
        shares = steps * mesh.size
        for (program, kind, function, line, kernel), each in took.items():
            row = {"trace": trace, "devices": f"{mesh.size} x {device.device_kind}"}
            row |= {"program": program, "kind": kind, "function": function}
            row |= {"line": line, "kernel": kernel}
            rows.append(row | {"ms_per_step": sum(each) / shares, "count": len(each) / shares})
    rows.sort(key=lambda row: -row["ms_per_step"])
    (folder / "lines.json").write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def describe(trace: str, rows: list[dict]) -> str:
    """Milliseconds of a step of a trace as text: by program and kind, then the rest by line."""
    kinds, lines = defaultdict(Counter), Counter()
    for row in rows:
        if row["trace"] == trace:
            kinds[row["program"]][row["kind"]] += row["ms_per_step"]
            if row["kind"] == "rest":
                lines[f"line {row['line']}, {row['function']}"] += row["ms_per_step"]
    text = [f"{f'{trace}, ms a step':24}" + "".join(f"{kind:>11}" for kind in KINDS)]
    for program, sums in kinds.items():
        text.append(f"{program:24}" + "".join(f"{sums[kind]:>11.3f}" for kind in KINDS))
    text += [f"{ms:>11.3f}  {line}" for line, ms in lines.most_common(LONGEST)]
    return "\n".join(text)
