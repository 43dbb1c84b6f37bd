"""Mutants of real checkpoints, and the contract that loading any of them must meet. Shared by the fuzz tests of all formats.

A format's test gathers `Sample`s (with `Spot`s where it knows the layout, so that offsets, counts and sizes are hit on purpose) and
calls `run`. Mutant number N of a seed is always the same: `mutant(samples, seed, N)` makes it again.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch_ort_ckpt as toc
from torch_ort_ckpt.checkpoint.state import is_string, nbytes
from torch_ort_ckpt.storage.tensors import byte_view

from .structure import Codec, change_structure

PARTS = 10
"""Each format's run is cut into so many tests, which stay short and can run side by side."""


def files_per_part(ordinary: int) -> int:
    """Mutants for one of the `PARTS` tests: `ordinary` in all, or as many as TOC_FUZZ_FILES says."""
    return -(-int(os.environ.get("TOC_FUZZ_FILES", ordinary)) // PARTS)


@dataclass(frozen=True)
class Spot:
    """A number that the file's structure depends on: an offset, a count, a size, a type."""

    position: int
    size: int


@dataclass(frozen=True)
class Sample:
    """A real checkpoint: its files by name, and which of them (or the folder they are in, ".") is to be loaded."""

    name: str
    files: dict[str, bytes]
    target: str
    spots: dict[str, list[Spot]] = field(default_factory=dict)
    codecs: tuple[Codec, ...] = ()
    """For those of its files that can be decoded: what takes them apart, so that structure can be changed."""


def sample(checkpoint: Path, spots: Callable[[bytes], list[Spot]] | None = None, *codecs: Codec) -> Sample:
    """The checkpoint file with its `.data` sidecar, or the checkpoint folder with everything in it. `spots` is asked for each file."""
    if checkpoint.is_dir():
        files = {str(place.relative_to(checkpoint)): place.read_bytes() for place in sorted(checkpoint.rglob("*")) if place.is_file()}
        target = "."
    else:
        data = Path(f"{checkpoint}.data")
        files = {place.name: place.read_bytes() for place in (checkpoint, data) if place.exists()}
        target = checkpoint.name
    known = {name: spots(content) for name, content in files.items()} if spots else {}
    return Sample(checkpoint.parent.name, files, target, known, codecs)


@dataclass(frozen=True)
class Mutant:
    """The files of a mutant, and how it was made."""

    files: dict[str, bytes]
    target: str
    story: str


def mutant(samples: Sequence[Sample], seed: int, number: int) -> Mutant:
    rng = random.Random(f"{seed}/{number}")
    origin = rng.choice(samples)
    files = dict(origin.files)
    story = [origin.name]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        if not files:
            break
        name = rng.choice(sorted(files))
        content = bytearray(files[name])
        spots = [spot for spot in origin.spots.get(name, ()) if spot.position + spot.size <= len(content)]
        if len(files) > 1 and rng.random() < 0.05:
            del files[name]
            story.append(f"{name} removed")
            continue
        if rng.random() < 0.5 and (changed := _restructure(rng, name, files[name], origin, samples)) is not None:
            files[name] = changed[0]
            story.append(f"{name} {changed[1]}")
            continue
        if spots and rng.random() < 0.6:
            change = _poke_spot(rng, content, spots)
        elif rng.random() < 0.15:
            change = _splice(rng, content, rng.choice(samples))
        else:
            change = rng.choice(_BLIND)(rng, content)
        files[name] = bytes(content)
        story.append(f"{name} {change}")
    return Mutant(files, origin.target, "; ".join(story))


def _restructure(rng: random.Random, name: str, content: bytes, origin: Sample, samples: Sequence[Sample]) -> tuple[bytes, str] | None:
    """Another file in this one's place, or one whose parts have changed places, types or sizes, some with those of another file."""
    other = rng.choice(samples)
    donor = other.files.get(name) or other.files[rng.choice(sorted(other.files))]
    if rng.random() < 0.05 and other is not origin:
        return donor, f"is the one of {other.name}"
    if not origin.codecs:
        return None
    return change_structure(rng, rng.choice(origin.codecs), content, donor if rng.random() < 0.7 else None)


def _poke_spot(rng: random.Random, content: bytearray, spots: list[Spot]) -> str:
    spot = rng.choice(spots)
    old = int.from_bytes(content[spot.position : spot.position + spot.size], "little")
    if rng.random() < 0.3:  # a number that makes sense elsewhere in the same file
        other = rng.choice(spots)
        new = int.from_bytes(content[other.position : other.position + other.size], "little")
    else:
        new = _number(rng, old, 8 * spot.size, len(content))
    new %= 1 << 8 * spot.size
    content[spot.position : spot.position + spot.size] = new.to_bytes(spot.size, "little")
    return f"spot {spot.position}+{spot.size}: {old} -> {new}"


def _number(rng: random.Random, old: int, bits: int, length: int) -> int:
    return rng.choice(
        (
            rng.choice((0, 1, 2, 3, 4, 8, 255, 65535, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 33, 1 << 40, 1 << 62, (1 << 63) - 1)),
            (1 << bits - 1) + rng.choice((-1, 0, 1)),  # the sign changes here
            -rng.choice((1, 2, 4, 8, old or 1, length)),
            old + rng.choice((-64, -8, -4, -2, -1, 1, 2, 4, 8, 64)),
            old * rng.choice((2, 4, 256)),
            length + rng.randrange(-16, 17),
            rng.randrange(length + 1),
            rng.randrange(1 << bits),
        )
    )


def _splice(rng: random.Random, content: bytearray, other: Sample) -> str:
    donor = other.files[rng.choice(sorted(other.files))]
    start, stop = sorted(rng.randrange(len(donor) + 1) for _ in range(2))
    at = rng.choice((start, rng.randrange(len(content) + 1)))
    if rng.random() < 0.5:
        content[at : at + stop - start] = donor[start:stop]
    else:
        content[at:] = donor[start:]
    return f"from {at}: bytes {start}..{stop} of {other.name}"


def _flip_bits(rng: random.Random, content: bytearray) -> str:
    for _ in range(rng.choice((1, 1, 2, 8))) if content else ():
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return "bits flipped"


def _poke_number(rng: random.Random, content: bytearray) -> str:
    size = rng.choice((1, 2, 4, 8))
    if len(content) < size:
        return "unchanged"
    position = rng.randrange((len(content) - size) // size + 1) * size
    return _poke_spot(rng, content, [Spot(position, size)])


def _truncate(rng: random.Random, content: bytearray) -> str:
    del content[rng.choice((0, rng.randrange(len(content) + 1), max(0, len(content) - rng.randrange(1, 9)))) :]
    return f"cut to {len(content)}"


def _append(rng: random.Random, content: bytearray) -> str:
    content += rng.choice((bytes, rng.randbytes))(rng.randrange(1, 100))
    return "longer"


def _remove_range(rng: random.Random, content: bytearray) -> str:
    start, stop = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    del content[start : min(stop, start + 64)]
    return f"{start}.. removed"


def _repeat_range(rng: random.Random, content: bytearray) -> str:
    start = rng.randrange(len(content) + 1)
    content[start:start] = content[start : start + rng.randrange(1, 65)]
    return f"{start}.. twice"


def _fill_range(rng: random.Random, content: bytearray) -> str:
    start = rng.randrange(len(content) + 1)
    size = len(content[start : start + rng.randrange(1, 65)])
    content[start : start + size] = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    return f"{start}+{size} filled"


def _randomise(rng: random.Random, content: bytearray) -> str:
    content[:] = content[: rng.choice((0, 8, 64))] + rng.randbytes(rng.randrange(600))
    return "random bytes"


_BLIND = (_flip_bits, _flip_bits, _poke_number, _poke_number, _truncate, _append, _remove_range, _repeat_range, _fill_range, _randomise)


@dataclass
class Report:
    """Counts of the outcomes of a run."""

    files: int = 0
    loaded: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    largest_peak: int = 0
    """Most memory that Python took for one load, in bytes."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.refused.most_common())
        return (
            f"{self.files} files: {self.loaded} loaded, {sum(self.refused.values())} refused ({kinds}); "
            f"slowest {self.slowest:.3f} s, largest peak {self.largest_peak >> 10} KiB"
        )


DEADLINE = 30.0
HEADROOM = 512 << 20
SLACK = 256 << 10
PEAK = 64


def run(
    samples: Sequence[Sample], folder: Path, *, seed: int, files: int, format: str, checksums: bool = False, **save_options: Any
) -> Report:
    """Make `files` mutants and check each against the contract; raises `AssertionError` with the mutant's history at the first violation.

    `checksums`: the format has some, which are checked when everything is read but not when it is mapped.
    """
    report = Report()
    for files_at_first in (samples[0].files, {"junk": b"in no format, so that every format's module is loaded"}):
        target = samples[0].target if "junk" not in files_at_first else "junk"
        check(
            Mutant(files_at_first, target, "warm-up"),
            folder / "warm-up",
            Report(),
            format,
            save_options,
            measured=False,
            checksums=checksums,
        )
    with limited_memory():
        for number in range(files):
            case = mutant(samples, seed, number)
            place = folder / "case"  # kept on a failure or a crash, to be looked at
            try:
                check(case, place, report, format, save_options, measured=number % 16 == 0, checksums=checksums)
            except BaseException as error:
                raise AssertionError(f"mutant {number} of seed {seed} ({case.story}): {type(error).__name__}: {error}") from error
    return report


def check(
    case: Mutant, place: Path, report: Report, format: str, save_options: dict[str, Any], *, measured: bool, checksums: bool = False
) -> None:
    """The contract: loading gives a state whose every byte can be touched, saved and read back, or a `CheckpointError` that says where;
    the same with and without a mapping, in bounded time and memory."""
    shutil.rmtree(place, ignore_errors=True)  # never overwritten in place: mappings may be alive
    for name, content in case.files.items():
        (place / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "in" / name).write_bytes(content)
    (place / "in").mkdir(parents=True, exist_ok=True)
    path = place / "in" / case.target
    size = sum(map(len, case.files.values()))
    started = time.monotonic()
    with deadline(), warnings.catch_warnings():
        warnings.simplefilter("ignore", toc.CheckpointWarning)
        with peak_memory(measured) as peak:
            mapped = _load(path, mmap=True)
        if measured:
            assert peak[0] <= PEAK * size + SLACK, f"{peak[0]} bytes taken for a file of {size}"
            report.largest_peak = max(report.largest_peak, peak[0])
        read = _load(path, mmap=False)
        if checksums and isinstance(read, toc.CheckpointError) and isinstance(mapped, toc.CheckpointState):
            _check_error(read, place)
            _check_state(mapped, mapped, size)
            report.refused["checksum"] += 1
        elif isinstance(mapped, toc.CheckpointError) or isinstance(read, toc.CheckpointError):
            assert checksums or (type(mapped) is type(read) and _without_reason(mapped) == _without_reason(read)), (
                f"mapped: {mapped!r}, read: {read!r}"
            )
            assert isinstance(mapped, toc.CheckpointError), f"read: {read!r}"
            assert isinstance(read, toc.CheckpointError), f"mapped: {mapped!r}"
            _check_error(read, place)
            report.refused[type(mapped).__name__] += 1
        else:
            _check_state(mapped, read, size)
            _check_round_trip(mapped, place / "out", format, save_options)
            report.loaded += 1
    report.files += 1
    report.slowest = max(report.slowest, time.monotonic() - started)


def _load(path: Path, *, mmap: bool) -> toc.CheckpointState | toc.CheckpointError:
    try:
        return toc.load(path, mmap=mmap)
    except toc.CheckpointError as error:
        return error


def _without_reason(error: object) -> str:
    """The message without the safetensors package's own reason: of several faults in a header it names any one."""
    return re.sub(r"malformed header \(.*\)", "malformed header", str(error))


def _check_error(error: toc.CheckpointError, place: Path) -> None:
    assert error.path, f"{error!r} names no file"
    assert os.path.realpath(error.path).startswith(os.path.realpath(place)), f"{error!r} names {error.path}"
    assert error.message
    str(error).encode()  # printable anywhere, whatever the file had in its names


def _check_state(mapped: toc.CheckpointState, read: toc.CheckpointState, size: int) -> None:
    assert mapped == read  # touches every byte
    held = {}
    for label, value in mapped.tensors():
        if is_string(value):
            held[label] = nbytes(value) + 8 * value.size
        else:
            storage = value.untyped_storage()
            held[storage.data_ptr() or label] = 0 if value.is_meta else storage.nbytes()
            assert value.is_meta or int(byte_view(value).sum() if value.numel() else 0) >= 0
    assert sum(held.values()) <= 64 * size + SLACK, f"{sum(held.values())} bytes held for a file of {size}"
    repr(mapped)


def _check_round_trip(state: toc.CheckpointState, out: Path, format: str, options: dict[str, Any]) -> None:
    out.mkdir()
    stale = state.stale_aliases()
    try:
        toc.save(state, out / "checkpoint", format=format, include_mixed_precision=True, durable=False, **options)
        again = toc.load(out / "checkpoint")
    except toc.CheckpointError:
        return
    assert stale or again == state, "saving and loading changed the state"


@contextlib.contextmanager
def deadline() -> Iterator[None]:
    """A hang in Python code becomes an error; one in C code is left to pytest-timeout. Counts the CPU time of this process only."""

    def expired(*_: object) -> None:
        raise TimeoutError(f"still busy after {DEADLINE} s")

    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return
    before = signal.signal(signal.SIGPROF, expired)
    signal.setitimer(signal.ITIMER_PROF, DEADLINE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """The process can't grow by more than `HEADROOM`: a huge allocation fails (in torch too), whether touched or not."""
    try:
        import resource
    except ImportError:  # Windows
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + HEADROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def peak_memory(measured: bool) -> Iterator[list[int]]:
    """Python's and numpy's allocations inside the block; torch's are bounded by `limited_memory` and `_check_state`."""
    peak = [0]
    if not measured:
        yield peak
        return
    tracemalloc.start()
    try:
        yield peak
        peak[0] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
