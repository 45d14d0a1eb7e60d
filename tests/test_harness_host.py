"""The host gate on machines with GPUs: who is visible, who holds what, what is free, and what disturbed an arm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support_harness import ROOT
from support_nvml import FakeGpu, fake_nvml, no_nvml

from harness import gate, gpus
from harness.admission import admit
from harness.errors import GateError
from harness.locks import hold, measuring_lock, places
from harness.meter import Meter, reasons
from harness.record.telemetry import Telemetry, busy, disturbed, throttled

A, B, C = (FakeGpu(f"GPU-{letter * 8}") for letter in "abc")


@pytest.fixture(autouse=True)
def every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell's own choice of GPUs is not these tests' business."""
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    monkeypatch.setattr("harness.admission.SETTLE_S", 0.0)


# ---- who is there ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, "abc"),
        ("2,0", "ca"),
        ("GPU-bbbbbbbb", "b"),
        ("GPU-b,1", "bb"),
        ("0,7,1", "a"),
        ("", ""),
        ("-1", ""),
        ("GPU-", ""),
    ],
)
def test_visible_gpus_are_numbered_as_cuda_numbers_them(value: str | None, found: str) -> None:
    """Guards against a lock on GPU 0 while the child runs on another: order, UUIDs, and the cut at an unknown one."""
    every = tuple(gpus.Gpu(index, card.uuid, card.name) for index, card in enumerate((A, B, C)))
    environ = {} if value is None else {gpus.VISIBLE: value}
    assert "".join(gpu.uuid[4] for gpu in gpus.visible(environ, every)) == found


@pytest.mark.parametrize("old", [False, True], ids=["new names", "bytes and old names"])
def test_the_driver_is_asked_and_let_go(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """Guards against NVML left open, and against releases that answer in bytes."""
    seen = fake_nvml(monkeypatch, A, B, old_names=old)
    assert gpus.installed() == (gpus.Gpu(0, A.uuid, A.name), gpus.Gpu(1, B.uuid, B.name))
    assert gpus.facts(gpus.installed()[0]) == {"driver": "580.1", "power_limit_w": 700}
    assert seen.open == 0


SMI = """\
#!{python}
import sys
if sys.argv[1].startswith("--query-compute"):
    print("GPU-aaaaaaaa, 77, 2048\\nGPU-bbbbbbbb, 78, 1\\nGPU-aaaaaaaa, 79, [N/A]")
elif "memory" in sys.argv[1]:
    print("GPU-aaaaaaaa, 1000, 143771\\nGPU-bbbbbbbb, 2000, 143771")
else:
    print("0, GPU-aaaaaaaa, NVIDIA H200\\n1, GPU-bbbbbbbb, NVIDIA H200")
"""


def test_nvidia_smi_answers_where_nvml_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one lock for all GPUs on a machine that has the driver but not the extra."""
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI.format(python=sys.executable), encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("harness.gpus.shutil.which", lambda name: str(program))
    first, second = gpus.installed()
    assert str(second) == "GPU 1 (NVIDIA H200)"
    assert gpus.state(first) == gpus.State(1000 * 2**20, 143771 * 2**20, {77: 2048 * 2**20, 79: None})
    program.write_text(f"#!{sys.executable}\nraise SystemExit('Failed to initialize NVML')\n", encoding="ascii")
    assert gpus.installed() == ()


# ---- locks ----------------------------------------------------------------------------------------------------------


def test_each_gpu_has_a_lock_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against two runs on one GPU, and against one run that keeps another off a GPU it does not use."""
    fake_nvml(monkeypatch, A, B)
    with hold("cuda", folder=tmp_path) as (first,), hold("cuda", folder=tmp_path) as (second,):
        assert (first.pin, second.pin) == (A.uuid, B.uuid)
        with pytest.raises(GateError, match=r"GPU 0 .* lock; another .* GPU 1 .* 1 of 2 are needed .* 0 free"):
            hold("cuda", folder=tmp_path).__enter__()
        with pytest.raises(GateError, match="another measuring run holds the GPU 1 "):
            measuring_lock("cuda:1", tmp_path).__enter__()
    with hold("cuda", jobs=2, folder=tmp_path) as both:
        assert [place.pin for place in both] == [A.uuid, B.uuid]
    with hold("cuda:1", folder=tmp_path) as (one,):
        assert (one.device, one.pin) == ("cuda:1", None)
        monkeypatch.setenv(gpus.VISIBLE, "1,0")  # the same card under another number
        with pytest.raises(GateError):
            measuring_lock("cuda:0", tmp_path).__enter__()
    assert len(list(tmp_path.glob("*.lock"))) == 2


def test_more_jobs_than_gpus_share_them_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against jobs that all land on one GPU, a shared GPU that others may measure on, and locks left behind."""
    fake_nvml(monkeypatch, A, B)
    with hold("cuda", jobs=3, folder=tmp_path) as shared:
        assert [place.pin for place in shared] == [A.uuid, B.uuid, A.uuid]
        with pytest.raises(GateError, match="0 free"):
            hold("cuda", folder=tmp_path).__enter__()
    with hold("cuda:1", jobs=2, folder=tmp_path) as one:
        assert [place.device for place in one] == ["cuda:1"] * 2
    with measuring_lock(places("cuda")[1], tmp_path):
        with pytest.raises(GateError, match="2 of 2 are needed on cuda and 1 free"):
            hold("cuda", jobs=2, folder=tmp_path).__enter__()
        with hold("cuda", folder=tmp_path) as (free,):
            assert free.pin == A.uuid


def test_without_a_driver_the_device_word_is_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `cuda` and `cuda:0` as two locks for one GPU."""
    no_nvml(monkeypatch)
    with hold("cuda", folder=tmp_path) as (place,):
        assert (place.gpu, place.pin) == (None, None)
        with pytest.raises(GateError, match="cuda:0 lock"):
            measuring_lock("cuda:0", tmp_path).__enter__()


def test_jobs_on_a_cpu_share_its_lock(tmp_path: Path) -> None:
    """Guards against a second run that measures on cores which a pool uses."""
    with hold("cpu", jobs=3, folder=tmp_path) as shared:
        assert [place.device for place in shared] == ["cpu"] * 3
        with pytest.raises(GateError, match="holds the cpu lock"):
            hold("cpu", folder=tmp_path).__enter__()


def test_a_killed_holder_frees_its_lock(tmp_path: Path) -> None:
    """Guards against a lock file that stays locked after `kill -9`."""
    code = (
        "import sys; from pathlib import Path; from harness.locks import hold\n"
        f"with hold('cpu', folder=Path({str(tmp_path)!r})):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(GateError):
            hold("cpu", folder=tmp_path).__enter__()
        other.kill()
    with hold("cpu", folder=tmp_path, wait_s=5):
        pass


# ---- who else is there ----------------------------------------------------------------------------------------------


def test_a_gpu_in_use_is_passed_over_or_refused_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against timing beside somebody's training job; bytes do not mind it, and --no-gate says what it passed."""
    held = FakeGpu(A.uuid, processes={4242: 12 * 2**30})
    fake_nvml(monkeypatch, held, B)
    with admit("cuda", lock_dir=tmp_path) as admitted:
        assert admitted.places[0].pin == B.uuid
        assert admitted.ignored is None
    with admit("cuda", timed=False, lock_dir=tmp_path) as admitted:
        assert admitted.places[0].pin == A.uuid
    words = r"another process, holding 12\.0 GiB, computes on GPU 0 \(NVIDIA H200\)"
    with pytest.raises(GateError, match=words):
        admit("cuda:0", lock_dir=tmp_path).__enter__()
    with admit("cuda:0", lock_dir=tmp_path, gate_off=True) as admitted:
        assert admitted.ignored is not None
        assert "12.0 GiB" in admitted.ignored[0]
    with admit("cuda:1", lock_dir=tmp_path, gate_off=True) as admitted:
        assert admitted.ignored == ()


def test_processes_of_a_run_that_was_just_killed_get_time_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a refusal of the second of two runs in a row because the driver still lists the first."""
    monkeypatch.setattr("harness.admission.SETTLE_S", 5.0)
    monkeypatch.setattr("harness.admission.POLL_S", 0.0)
    answers = iter(["still there", "still there", None])
    fake_nvml(monkeypatch, A)
    monkeypatch.setattr(gate, "foreign_processes", lambda gpu: next(answers))
    with admit("cuda", lock_dir=tmp_path) as admitted:
        assert admitted.places[0].gpu is not None


def test_jobs_take_equal_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one record of two kinds of GPU."""
    fake_nvml(monkeypatch, A, FakeGpu(B.uuid, name="NVIDIA L4"))
    with pytest.raises(GateError, match=r"several kinds \(NVIDIA H200, NVIDIA L4\)"):
        admit("cuda", 2, lock_dir=tmp_path).__enter__()


def test_gpu_memory_is_checked_before_a_load(tmp_path: Path) -> None:
    """Guards against a CUDA out-of-memory error in the middle of a run; the message says how much and what to do."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(9 * 2**30)
    gib = 2**30
    assert gate.memory_problem((tmp_path,), "cuda", 8 * gib, 11 * gib) is None
    assert gate.memory_problem((tmp_path,), "cuda", None, None) is None
    problem = gate.memory_problem((tmp_path,), "cuda:1", 8 * gib, 9 * gib)
    assert problem is not None
    for words in ("takes about 10.0 GiB of GPU memory", "9.0 GiB are free on cuda:1", "use a larger GPU"):
        assert words in problem
    assert "2.0 GiB and 1.0 GiB are free" in (gate.memory_problem((tmp_path,), "cuda", gib, 11 * gib) or "")
    assert "give --jobs 2" in (gate.job_memory_problem((tmp_path,), 3, 20 * gib) or "")
    assert gate.job_memory_problem((tmp_path,), 2, 20 * gib) is None
    assert gate.job_memory_problem((tmp_path,), 3, 20 * gib, 31 * gib, "cuda") is None
    problem = gate.job_memory_problem((tmp_path,), 4, 20 * gib, 31 * gib, "cuda")
    assert problem is not None
    assert "4 x 10.0 GiB and 31.0 GiB are free on cuda; give --jobs 3" in problem
    assert "4 x 2.0 GiB" in (gate.job_memory_problem((tmp_path,), 4, 7 * gib, None, "cuda") or "")


# ---- readings -------------------------------------------------------------------------------------------------------


def test_a_reading_has_the_gpu_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against telemetry that is always empty."""
    card = FakeGpu(A.uuid, reasons=0x5, thermal_ns=2_500_000)
    seen = fake_nvml(monkeypatch, card)
    with Meter(gpus.installed()[0]) as meter:
        now = meter.read()
        assert seen.open == 1
    assert seen.open == 0
    assert (now.sm_clock_mhz, now.memory_clock_mhz, now.temperature_c, now.power_w) == (1980, 3201, 61, 412.3)
    assert now.memory_temperature_c == 74
    assert (now.utilisation, now.throttle) == (97, ("gpu_idle", "sw_power_cap"))
    assert (now.power_held_ms, now.thermal_held_ms) == (0.0, 2.5)
    assert now.own_cpu_s is not None
    if Path("/proc/stat").exists():
        assert now.cores
        assert now.cpu_busy_s is not None
        assert now.cpu_busy_s > now.own_cpu_s / 2
    assert Telemetry.model_validate_json(now.model_dump_json()) == now


def test_a_reading_that_a_card_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one unsupported call that empties the rest, and against no NVML at all."""
    missing = ("nvmlDeviceGetTemperature", "nvmlDeviceGetViolationStatus")
    card = FakeGpu(A.uuid, reasons=0x20, memory_temperature=None)
    fake_nvml(monkeypatch, card, missing=missing, old_names=True)
    with Meter(gpus.installed()[0]) as meter:
        now = meter.read()
    assert (now.temperature_c, now.memory_temperature_c) == (None, None)
    assert (now.power_held_ms, now.sm_clock_mhz) == (None, 1980)
    assert now.throttle == ("sw_thermal_slowdown",)
    no_nvml(monkeypatch)
    with Meter(gpus.Gpu(0, A.uuid, A.name)) as meter:
        assert meter.read().sm_clock_mhz is None


def test_unknown_reasons_keep_their_number() -> None:
    """Guards against a new driver's reason that reads as no reason."""
    assert reasons(0) == ()
    assert reasons(0x1 | 0x40000) == ("gpu_idle", "reason_0x40000")


def reading(at_s: float, **values: object) -> Telemetry:
    return Telemetry.model_validate({"at_s": at_s, "cores": 4, **values})


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({}, {}, None),
        ({"throttle": ()}, {"throttle": ("gpu_idle", "applications_clocks_setting")}, None),
        ({"throttle": ()}, {"throttle": ("sw_power_cap",)}, "throttled: sw_power_cap"),
        ({"throttle": ("hw_slowdown",)}, {"throttle": ()}, "throttled: hw_slowdown"),
        ({"throttle": ("sync_boost",)}, {}, "throttled: sync_boost"),
        ({"power_held_ms": 5.0}, {"power_held_ms": 14.9}, None),
        ({"power_held_ms": 5.0}, {"power_held_ms": 65.0}, "throttled: power limit 60 ms"),
        ({"thermal_held_ms": 0.0}, {"thermal_held_ms": 40.0}, "throttled: heat 40 ms"),
        ({"cpu_throttles": 3}, {"cpu_throttles": 3}, None),
        ({"cpu_throttles": 3}, {"cpu_throttles": 4}, "throttled: cpu heat"),
    ],
)
def test_what_counts_as_throttled(before: dict[str, object], after: dict[str, object], found: str | None) -> None:
    """Guards against a slow clock on one side of a pair, seen in a reading or only in a counter between two."""
    assert throttled(reading(10.0, **before), reading(11.0, **after)) == found
    assert disturbed(reading(10.0, **before), reading(11.0, **after)) == found


def test_a_missing_reading_says_nothing_about_the_other() -> None:
    """Guards against a crash, or a clean bill, where one of the two readings was not taken."""
    hot = reading(1.0, throttle=("hw_thermal_slowdown",))
    assert throttled(None, None) is None
    assert throttled(hot, None) == throttled(None, hot) == "throttled: hw_thermal_slowdown"
    assert busy(None, hot) is None


@pytest.mark.parametrize(
    ("seconds", "whole", "own", "found"),
    [
        (1.0, 1.0, 1.0, None),
        (1.0, 2.0, 1.0, None),
        (1.0, 2.5, 1.0, "busy: other work on 1.5 of 4 cores"),
        (2.0, 2.5, 1.0, None),
        (0.1, 0.4, 0.0, None),
    ],
)
def test_other_work_is_what_our_processes_did_not_do(
    seconds: float, whole: float, own: float, found: str | None
) -> None:
    """Guards against calling our own children foreign, and against judging spans below the clock."""
    before = reading(5.0, cpu_busy_s=100.0, own_cpu_s=10.0)
    after = reading(5.0 + seconds, cpu_busy_s=100.0 + whole, own_cpu_s=10.0 + own)
    assert busy(before, after) == found


def test_waiting_for_a_quiet_cpu_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a run that waits for ever on a busy machine, or does not wait at all."""
    loads = iter([0.0, 4.0, 4.0, 8.0, 8.0, 8.0])  # CPU seconds: busy, busy, then quiet; four cores
    times = iter(float(n) for n in range(6))
    monkeypatch.setattr(Meter, "read", lambda self: reading(next(times), cpu_busy_s=next(loads), own_cpu_s=0.0))
    quiet = gate.wait_until_quiet(limit_s=30, sample_s=0)
    assert quiet.note == ""
    loads, times = iter([0.0, 4.0]), iter([0.0, 1.0])
    assert gate.wait_until_quiet(limit_s=0, sample_s=0).note == "other work on 4.0 of 4 cores"
