"""Ranks without the start-up time of `torchrun`: one process imports everything, then forks the ranks of each run of a plan.

`python -m tests.training.forked '[[2, ["DIRECTORY", "10"]], ...]'` prints, per run, one JSON line: exit codes, result, errors.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.training import worker
from tests.training.faults import import_all


def run(ranks: int, arguments: list[str]) -> dict[str, object]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(number, ranks, port, arguments, Path(folder)) for number in range(ranks)]
        codes = _wait(children)
        outputs = [(Path(folder) / f"{number}.out").read_text() for number in range(ranks)]
        errors = "".join((Path(folder) / f"{number}.err").read_text() for number in range(ranks))
    lines = [line for line in outputs[0].splitlines() if line.startswith("{")]
    return {"codes": codes, "result": json.loads(lines[-1]) if lines else {}, "errors": errors[-4000:]}


def _fork(number: int, ranks: int, port: int, arguments: list[str], folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
            os.dup2(os.open(folder / f"{number}.{name}", os.O_WRONLY | os.O_CREAT), stream.fileno())
        sys.argv = ["worker", *arguments]
        worker.main()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: list[int]) -> list[int]:
    """Exit codes. The others notice by themselves when one has failed; they are ended only if that takes minutes."""
    codes: dict[int, int] = {}
    failed: float | None = None
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(found[1])
        if failed is None and any(codes.values()):
            failed = time.monotonic()
        if failed is not None and time.monotonic() - failed > 200:
            for child in children:
                if child not in codes:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[child] for child in children]


def warm_up() -> None:
    """Import here, once, what PyTorch and this library import on first use."""
    for name in ("torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.checkpoint.state_dict", "onnxruntime"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        import_all(Path(folder))


if __name__ == "__main__":
    warm_up()
    for ranks, arguments in json.loads(sys.argv[1]):
        print(json.dumps(run(ranks, arguments)), flush=True)
