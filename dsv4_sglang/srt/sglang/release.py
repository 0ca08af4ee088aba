"""The supported release of SGLang, and the installed one.

To support the next release, see docs/design/adding_a_release.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from dsv4_sglang.srt.launch.error import LaunchError

# The supported release. Another one starts with a warning if `sglang_contract` finds no difference, and is rejected
# otherwise.
RELEASE = "0.5.23"


def sglang_version() -> str:
    return version("sglang")


def is_supported() -> bool:
    """Return True if the installed release is the supported one."""
    return sglang_version() == RELEASE


def version_note() -> str:
    """Return a sentence about the installed release for error messages."""
    return f"this is SGLang {sglang_version()}; supported: {RELEASE}"


@contextmanager
def rejecting_other_releases() -> Iterator[None]:
    """Raise LaunchError, one line, for any exception inside if the installed release is not supported."""
    try:
        yield
    except LaunchError:
        raise
    except Exception as error:
        if is_supported():
            raise
        raise LaunchError(f"this package does not fit the installed release: {version_note()}; {error!r}") from error
