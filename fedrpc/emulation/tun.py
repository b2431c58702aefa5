"""A network namespace for this process, whose only way out is a TUN device; without root, in a user namespace.

The namespace is its process's alone. The device's file goes to the process that forwards packets (`packets.py`), and
the device lives as long as that keeps it open.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from fedrpc.errors import ConfigError, Unavailable

MTU_BYTES = 1500  # a TUN device's, as on Ethernet
SERVER = 1  # the server's place; clients follow
SERVER_HOST = "10.0.0.1"
_NETMASK = "255.0.0.0"
_TUN = "/dev/net/tun"
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK = 0x8913, 0x8914, 0x8916, 0x891C  # linux/sockios.h
_IFF_UP = 1  # linux/if.h
_ALLOW_NAMESPACES = (
    "allow user namespaces to everybody (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns), or run it as root"
)
_ALLOW_TUN = f"load the kernel's module tun, or give the container {_TUN}"


class _Missing(OSError):
    """This machine does not allow what a network of TUN devices needs."""

    def __init__(self, what: str, why: OSError, remedy: str) -> None:
        super().__init__(why.errno, why.strerror)
        self.what, self.remedy = what, remedy

    def __str__(self) -> str:
        return f"{self.what} ({self.strerror}); {self.remedy}"


def name_congestion_control() -> str:
    """How this machine's TCP answers to losses, such as `cubic` or `bbr`; "" where the kernel does not tell."""
    path = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return path.read_text().strip() if path.exists() else ""


def get_place(client: int) -> int:
    """A client's place in the network: its address without 10."""
    return SERVER + 1 + client


def check_tun() -> None:
    """Raises ConfigError, with what is missing, when this machine does not let processes have networks of their own.

    A child tries it. To be called before the process has threads.
    """
    if not sys.platform.startswith("linux"):
        raise ConfigError("--shaper tun needs Linux; leave --shaper out")
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            _enter(SERVER)
        except OSError as missing:
            os.write(writer, str(missing).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as complaint:
        why = complaint.read()
    os.waitpid(pid, 0)
    if why:
        raise ConfigError(f"--shaper tun needs {why}, or leave --shaper out for a shaper that needs neither")


def enter_network(door: str, place: int) -> None:
    """Moves this process into a network of its own; raises Unavailable if that fails.

    To be called before the process has threads.

    Args:
        door: The socket of the process that forwards packets, which gets the device.
    """
    try:
        device = _enter(place)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.connect(door)
            socket.send_fds(sending, [str(place).encode()], [device])
        os.close(device)
    except OSError as error:
        raise Unavailable(f"no network of its own for this process: {error}") from None


def _enter(place: int) -> int:
    """Enters a new namespace; returns the file of its device."""
    _unshare()
    name = b"tun0"
    try:
        device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _Missing(_TUN, error, _ALLOW_TUN) from None
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name, _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            address = socket.inet_ntoa((10 << 24 | place).to_bytes(4))
            for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, _NETMASK)):
                packed = struct.pack("16sHH4s16x", name, socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, request, packed)
            for each in (b"lo", name):
                asked = struct.pack("16sH22x", each, 0)
                flags = struct.unpack("16sH22x", fcntl.ioctl(control, _SIOCGIFFLAGS, asked))[1]
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", each, flags | _IFF_UP))
    except OSError as error:  # AppArmor may allow a user namespace, but nothing in it
        raise _Missing("a TUN device in a network namespace", error, _ALLOW_NAMESPACES) from None
    return device


def _unshare() -> None:
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if not libc.unshare(_CLONE_NEWNET):
        return
    if ctypes.get_errno() == errno.EPERM and not libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET):
        try:
            with contextlib.suppress(FileNotFoundError), open("/proc/self/setgroups", "w") as file:
                file.write("deny")  # or the group could not be given
            for kind, number in (("uid", user), ("gid", group)):
                with open(f"/proc/self/{kind}_map", "w") as file:
                    file.write(f"{number} {number} 1")
            return
        except OSError as error:
            raise _Missing("the same user in a user namespace", error, _ALLOW_NAMESPACES) from None
    code = ctypes.get_errno()
    raise _Missing("user and network namespaces", OSError(code, os.strerror(code)), _ALLOW_NAMESPACES)
