"""What this process may use of its machine: cores, memory, ports.

Asks the kernel and, inside a container, its control group; knows nothing of pdq's processes. `serve.py` divides what is
found here among them.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from pdq.errors import ConfigError

CGROUP = Path("/sys/fs/cgroup")


def cores(cgroup: Path = CGROUP) -> int:
    """Cores this process may run on: its CPU affinity, and no more than the control group's quota. At least 1."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit() and int(period):
        mine = min(mine, int(quota) // int(period))
    return max(1, mine)


def memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory this process may use: the machine's, and no more than the control group's limit."""
    mine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(cgroup / "memory.max")
    return min(mine, int(limit)) if limit.isdigit() else mine


def divide(total: int, workers: int) -> list[int]:
    """Threads of each worker so that their sum is `total`, the first ones taking the rest; at least 1 each.

    The sum is above `total` only when there are more workers than cores.
    """
    share, rest = divmod(total, workers)
    return [max(1, share + (i < rest)) for i in range(workers)]


def free_port(host: str = "127.0.0.1") -> int:
    """A port nobody listens on now."""
    return _bind(host, 0)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nothing can listen on `host`:`port`, in words a person can act on."""
    try:
        _bind(host, port)
    except socket.gaierror as e:
        raise ConfigError(f"host: {host} is not an address of this machine ({e.strerror})") from e
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigError(f"port: {port} on {host} is in use; choose another with --port") from e
        if e.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"host: {host} is not an address of this machine") from e
        raise ConfigError(f"port: cannot listen on {host} port {port} ({os.strerror(e.errno or 0)})") from e


def _bind(host: str, port: int) -> int:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as probe:
        # As the gateway's own socket: connections of the last run in TIME_WAIT do not count as "in use".
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not a control group of this kind: no limit from here
