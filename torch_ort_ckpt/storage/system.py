"""What differs between operating systems, apart from locks (see `locks`): syncing, and renaming or deleting files that are in use."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any


def is_windows() -> bool:
    """Whether files follow Windows' rules: while one is open or mapped, it can't be renamed, replaced or deleted. Told by the absence of
    `fcntl`, which goes with them."""
    try:
        import fcntl  # noqa: F401
    except ImportError:
        return True
    return False


def sync(descriptor: int) -> None:
    """Write a file's bytes to the medium. On macOS fsync leaves them in the drive's cache, and F_FULLFSYNC does not."""
    if not is_windows():
        import fcntl

        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is not None:
            try:
                fcntl.fcntl(descriptor, full)
                return
            except OSError as error:
                if error.errno not in _UNSUPPORTED:  # a second sync might succeed although bytes are lost
                    raise
    os.fsync(descriptor)


_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY)
"""What file systems without F_FULLFSYNC answer, such as network shares."""
_PAUSES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)


def patiently(action: Callable[..., None], *paths: Any) -> None:
    """Rename, replace or delete. Windows refuses while another process has the file open, as virus scanners and readers do for a moment."""
    for pause in _PAUSES if is_windows() else ():
        try:
            return action(*paths)
        except PermissionError:
            time.sleep(pause)
    return action(*paths)
