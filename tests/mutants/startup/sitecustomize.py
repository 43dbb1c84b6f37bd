"""Python runs this at its start where this folder is on PYTHONPATH: a process that a test starts is measured too, as part of that test."""

import atexit
import os

if "MUTANTS_COVERAGE" in os.environ:
    import coverage

    measured = coverage.Coverage(
        data_file=os.environ["MUTANTS_COVERAGE"],
        data_suffix=True,
        include=[os.environ["MUTANTS_MEASURED"]],
        context=os.environ.get("MUTANTS_CONTEXT", ""),
        config_file=False,
        messages=False,
    )
    measured.start()

    def save() -> None:
        measured.stop()
        measured.save()

    atexit.register(save)
