from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedrpc.emulation import tun
from fedrpc.emulation.tun import check_tun
from fedrpc.errors import ConfigError


def set_kernel(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Has the kernel answer as if it allowed namespaces (0), or did not."""
    ctypes.set_errno(code)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(unshare=lambda _: -1 if code else 0))


def test_what_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_kernel(monkeypatch, errno.EPERM)
    with pytest.raises(ConfigError, match=r"needs user and network namespaces \(Operation not permitted\); allow user"):
        check_tun()
    set_kernel(monkeypatch, errno.ENOSPC)
    with pytest.raises(ConfigError, match=r"\(No space left on device\); .*max_user_namespaces.*, or leave --shaper"):
        check_tun()
    set_kernel(monkeypatch, 0)
    monkeypatch.setattr(tun, "_TUN", str(tmp_path / "tun"))
    with pytest.raises(ConfigError, match=r"needs .*/tun \(No such file or directory\); load the kernel's module tun"):
        check_tun()
    (tmp_path / "tun").touch()
    with pytest.raises(ConfigError, match=r"needs a TUN device in a network namespace \(Inappropriate ioctl"):
        check_tun()
