"""A scripted child for tests of the harness: speaks the worker's protocol without loading an engine.

Run as a program: `python support_harness.py SCRIPT.json`; the script says what to answer, and how to misbehave.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SPEC_TEXT = """\
schema: 1
name: tiny
title: A scripted pair
pair:
  target: {path: target}
  drafter: {path: drafter}
  block_size: 4
checks:
  - {kind: exactness_probe, id: probe, draws: [8], walk: false}
  - kind: attribution
    id: attribution
    draws: [8]
    walk: false
    stages: [base, rowwise]
    matrix:
      multirow: {env: MLXCEL_QMV_MULTIROW, values: [null, "0"]}
  - {kind: greedy_parity, id: parity, prompts: [{text: one two three, form: raw}], max_tokens: 9}
  - {kind: throughput, id: decode, arms: [{name: mtp}], repeats: 3, max_tokens: 9}
  - {kind: decline, id: decline, stage: base, expect_reason: differs, max_tokens: 4}
"""


def write_spec(folder: Path, text: str = SPEC_TEXT) -> Path:
    """A spec with empty checkpoint folders beside it: enough for everything but a real engine."""
    for name in ("target", "drafter"):
        (folder / "specs" / name).mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    path = folder / "specs" / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def worker(folder: Path, **script: Any) -> tuple[str, ...]:
    """Command of a scripted child; every child of it adds a line to `starts.txt` in that folder."""
    file = folder / "script.json"
    file.write_text(json.dumps({"folder": str(folder), **script}), encoding="utf-8")
    return (sys.executable, str(Path(__file__).resolve()), str(file))


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process ends within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not alive(pid):
            return True
        time.sleep(0.02)
    return not alive(pid)


# ---- the child ------------------------------------------------------------------------------------------------------


def emit(**message: Any) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def misbehave(how: str | None) -> None:
    """End or break in the way that a test asks for."""
    if how == "exit":
        sys.stderr.write("the last words of this child\n")
        sys.stderr.flush()
        os._exit(7)
    if how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "garbage":
        sys.stdout.write("Warning: something printed to stdout\n")
        sys.stdout.flush()
    if how == "half":
        sys.stdout.write('{"event": "result", "job"')
        sys.stdout.flush()
        os._exit(0)
    if how == "hang":
        time.sleep(600)
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)


def draw(case: str, passed: bool) -> dict[str, Any]:
    return {
        "line": "draw",
        "case": case,
        "draw": "draw 0 (8 tokens)",
        "prompt_tokens": 8,
        "block_size": 4,
        "positions": 4,
        "passed": passed,
        "differing_bytes": 0 if passed else 12,
        "total_bytes": 512,
        "first_position": None if passed else 2,
        "seconds": 0.01,
    }


def decision(case: str, engaged: bool, chain: str) -> dict[str, Any]:
    reason = "verify block is byte-identical to the single-token chain" if engaged else "verify block differs"
    return {
        "line": "decision",
        "case": case,
        "engaged": engaged,
        "inexact": False,
        "reason": reason,
        "log_line": f"MTP {'engaged' if engaged else 'declined'}: {reason}",
        "classic_sha256": chain,
        "first_divergence": None
        if engaged
        else {
            "layer": 0,
            "layer_kind": "sliding",
            "op": "attention core",
            "position": 2,
            "differing_bytes": 12,
            "total_bytes": 128,
        },
    }


def comparison(case: str, prompt: str, size: int, identical: bool) -> dict[str, Any]:
    return {
        "line": "comparison",
        "case": case,
        "prompt": prompt,
        "form": "raw",
        "prompt_tokens": 3,
        "block_size": size,
        "tokens": 9,
        "identical": identical,
        "text_identical": identical,
        "first_difference": None if identical else 4,
        "classic_sha256": "a" * 64,
        "mtp_sha256": ("a" if identical else "b") * 64,
        "finish_reason": "length",
        "distinct_tokens": 9,
        "accepted_per_round": [3, 3],
        "drafted_per_round": [size - 1, size - 1],
        "decode_s": 0.1,
        "classic_decode_s": 0.2,
    }


def engine_lines(case: str, arm: str, context: int, ms: float, equal: int = 4) -> tuple[dict[str, Any], ...]:
    """A block of four rows, of which `equal` are its chain's, and times of ten tokens."""
    block = {"line": "block", "case": case, "arm": arm, "context_tokens": context, "rows": 4, "rows_equal": equal}
    block |= {"differing_bytes": 9 * (4 - equal), "total_bytes": 64, "argmax_equal": 4, "repeatable": True}
    block |= {"seconds": [ms / 500] * 5}
    times = {"line": "decode", "case": case, "arm": arm, "context_tokens": context, "tokens": [5] * 15}
    return block, {**times, "seconds": [ms / 1000] * 10}


def check(case: str, name: str, passed: bool = True) -> dict[str, Any]:
    return {"line": "check", "case": case, "name": name, "passed": passed, "expected": "x", "found": "x"}


IDENTITY = {
    "target": "1" * 64,
    "drafter": "2" * 64,
    "source": "3" * 64,
    "torch": "0",
    "triton": "0",
    "driver": "none",
    "device": "A CPU",
    "compute_capability": "AVX2",
    "threads": 1,
    "backend": "reference",
    "dtype": "bfloat16",
    "geometry": "hidden 8",
    "window": 16,
}


def path(case: str, args: dict[str, Any], size: int, flags: dict[str, str], **changes: Any) -> dict[str, Any]:
    """What a probe, or an arm, says that it computes with."""
    linear = "multirow" if flags.get("MLXCEL_QMV_MULTIROW") == "1" else "per_row"
    return {
        "line": "path",
        "case": case,
        "arm": args.get("arm"),
        "stage": args.get("stage", "rowwise"),
        "block_size": size,
        "identity": IDENTITY,
        "flags": flags,
        "path": {"verify linear": linear},
        "longest_prompt": 3,
        "fingerprint": f"{linear}-{size}",
        **changes,
    }


def certificate(case: str, size: int, flags: dict[str, str], chain: str, **changes: Any) -> dict[str, Any]:
    """What a passed start-up probe leaves."""
    from harness import certificate as made
    from harness.record.lines import Identity, ProbeInput

    inputs = [ProbeInput(name="walk of 128 from 160 tokens", prompt_tokens=160, rows=128, total_bytes=512)]
    stage, size_stated = changes.pop("stage", "rowwise"), changes.pop("width", size)
    identity = Identity.model_validate({**IDENTITY, **changes})
    return made.make(case, identity, flags, stage, size_stated, inputs, chain).model_dump(mode="json")


def answer(job: dict[str, Any], script: dict[str, Any]) -> dict[str, Any]:
    """Raw lines and data for one job."""
    case, args, kind = job["case"], job["args"], job["kind"]

    def line(content: dict[str, Any]) -> None:
        emit(event="line", job=job["id"], line=content)

    flags = script["flags"]
    chain = "c" * 64
    if kind == "probe":
        passed = args["stage"] == "rowwise" or "exact" in script
        if script.get("moved_chain") == args["stage"]:
            chain = "d" * 64
        for _ in args["draws"]:
            line(draw(case, passed))
        line(decision(case, passed, chain))
        line(path(case, args, 4, flags, **script.get("path", {})))
        if args.get("ops"):
            return {"differing_ops": [] if passed else ["attention", "rope"]}
    elif kind == "parity":
        line(decision(case, True, chain))
        for prompt in args["prompts"]:
            for size in args["block_sizes"]:
                line(comparison(case, prompt["name"], size, "differ" not in script))
    elif kind == "decline":
        line(draw(case, False))
        line(decision(case, False, chain))
        for prompt in args["prompts"]:
            line(check(case, f"{prompt['name']}: output"))
    elif kind == "generate":
        if args["mode"] == "decide":
            line(decision(case, True, chain))
            line(path(case, args, args["block_size"], flags, **script.get("path", {})))
            if "uncertified" not in script:
                line(certificate(case, args["block_size"], flags, chain, **script.get("certificate", {})))
            return {"engaged": True, "reason": "exact"}
        mtp = args["mode"] == "mtp"
        return {
            "engaged": mtp,
            "prompt_tokens": 3,
            "tokens": 9,
            "sha256": ("b" if mtp and "differ" in script else "a") * 64,
            "distinct_tokens": 9,
            "ttft_s": 0.01,
            "decode_s": script.get("mtp_s", 0.1) if mtp else 0.2,
            "accepted_per_round": [3, 3] if mtp else [],
            "drafted_per_round": [3, 3] if mtp else [],
            "verify_s": 0.08 if mtp else 0.0,
            "draft_s": 0.02 if mtp else 0.0,
        }
    elif kind == "steps":
        sizes = args.get("block_sizes", [4])
        steps = [("classic", 1), ("classic_unpadded", 1), *(("verify", size) for size in sizes)]
        for step, rows in (*steps, *(("draft_round", size - 1) for size in sizes if size > 1)):
            seconds = [0.0001 * rows if step == "draft_round" else 0.001] * 3
            content = {"line": "step", "case": case, "step": step, "rows": rows, "context_tokens": 7}
            line({**content, "seconds": seconds})
    elif kind in ("decode_ours", "decode_peer"):
        arm = args.get("peer", "ours")
        if arm not in script.get("absent", ()):
            for context in args["contexts"]:
                for content in engine_lines(case, arm, context, script.get("decode_ms", {}).get(arm, 10.0)):
                    line(content)
        if arm != "ours":
            reason = "is not installed" if arm in script.get("absent", ()) else None
            line({"line": "peer", "case": case, "peer": arm, "reason": reason, "version": "1.0", "note": "a script"})
        return {"ids": [1] * 60, "exact": True}
    elif kind == "machine":
        return script.get("machine", {"cuda": False, "reason": "torch.cuda.is_available() is False", "gpus": []})
    return dict(script.get("data", {}))


def main() -> None:
    """Answer the setup and every job as the script says."""
    script = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with (Path(script["folder"]) / "starts.txt").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {os.environ.get('MLXCEL_QMV_MULTIROW', 'unset')}\n")
    with (Path(script["folder"]) / "pins.txt").open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}\n")
    if "tied" in script:  # as the real worker, to the thread that started it
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if "grandchild" in script:
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (Path(script["folder"]) / "grandchild.txt").write_text(str(process.pid), encoding="ascii")
    sys.stdin.readline()
    misbehave(script.get("at_start"))
    if "refuse" in script:
        emit(event="error", job=None, kind="input", message=script["refuse"])
        return
    sys.path.insert(0, str(ROOT))
    from engine.flags import read_flags

    reading = read_flags({} if "deaf" in script else None)
    script["flags"] = reading.effective
    emit(
        event="ready",
        flags_requested=reading.requested,
        flags_effective=reading.effective,
        versions={"torch": "0"},
        settings=script.get("settings", []),
        target={"name": "target"},
    )
    for text in sys.stdin:
        job = json.loads(text)
        with (Path(script["folder"]) / "jobs.txt").open("a", encoding="utf-8") as file:
            file.write(f"{job['kind']} {job['case']}\n")
        began = time.monotonic()
        time.sleep(script.get("slow", 0))
        if script.get("on") in (None, job["case"].partition("::")[2], job["kind"]):
            misbehave(script.get("how"))
            if "fail" in script:
                emit(event="error", job=job["id"], kind=script["fail"], message=script.get("message", "no"))
                continue
        data = answer(job, script)
        with (Path(script["folder"]) / "spans.txt").open("a", encoding="utf-8") as file:
            file.write(f"{began} {time.monotonic()} {os.getpid()} {job['case']}\n")
        emit(event="result", job=job["id"], data=data, peak_memory_bytes=script.get("peak"))


if __name__ == "__main__":
    main()
