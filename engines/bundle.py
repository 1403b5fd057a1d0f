"""A bundle on disk: opening checks every file against the manifest, writing renames a finished folder into place."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import manifest as manifests
from .errors import BundleError, IntegrityError, ManifestError
from .files import whole_file
from .manifest import FileEntry, Manifest

MANIFEST = "manifest.json"
SUFFIX = ".speceyes"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its folder and its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> "Bundle":
        """Open a bundle and check its files.

        `verify`: hash every file (about a second per gigabyte); sizes, surplus and missing files are always checked.
        Raises BundleError when `path` is no bundle, ManifestError for a bad manifest, IntegrityError for a bad file.
        """
        folder = Path(path)
        source = folder / MANIFEST
        if not source.is_file():
            reason = "there is no such folder" if not folder.exists() else f"it holds no {MANIFEST}"
            raise BundleError(
                f"bundle {str(path)!r}: {reason}; make one with `speceyes-compile build CHECKPOINT -o {folder.name}`"
            )
        with source.open("rb") as file:
            bundle = cls(folder, manifests.loads(file.read(manifests.MAX_BYTES + 1)))
        bundle.check_files(verify=verify)
        return bundle

    def check_files(self, *, verify: bool = True) -> None:
        """Raise IntegrityError for the first missing, surplus, linked, truncated or altered file."""
        listed = {entry.path: entry for entry in self.manifest.files}
        for relative in _walk(self.path):
            if relative not in listed and relative != MANIFEST:
                raise IntegrityError(f"{relative}: surplus file, the manifest does not list it; delete it or rebuild")
        for entry in listed.values():
            self._check_file(entry, verify)

    def _check_file(self, entry: FileEntry, verify: bool) -> None:
        path = self.path / entry.path
        if not path.is_file():
            raise IntegrityError(f"{entry.path}: the file is missing; copy the bundle again or rebuild it")
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise IntegrityError(f"{entry.path}: a link that leaves the bundle; a regular file is expected")
        size = path.stat().st_size
        if size != entry.size:
            raise IntegrityError(f"{entry.path}: found {size} bytes; the manifest says {entry.size}; copy it again")
        if verify and (found := hash_file(path)) != entry.sha256:
            raise IntegrityError(
                f"{entry.path}: SHA-256 {found[:12]}… differs from the manifest's {entry.sha256[:12]}…; "
                "the file was altered, copy it again or rebuild"
            )

    @property
    def size(self) -> int:
        """Bytes of all files beside the manifest."""
        return sum(entry.size for entry in self.manifest.files)


def check_output(path: str | os.PathLike[str]) -> Path:
    """`path` as a Path. Raises BundleError when it exists and is not a bundle, which may be replaced."""
    target = Path(path)
    if target.exists() and not (target / MANIFEST).is_file():
        raise BundleError(f"output {str(path)!r}: it exists and is not a bundle; choose another name or delete it")
    return target


@contextmanager
def write_bundle(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary folder to fill; on success rename it to `path`, replacing a bundle that stands there.

    On any exception, Ctrl-C included, the folder is removed and `path` is left as it was.
    Raises BundleError when `path` exists and is not a bundle.
    """
    target = check_output(path)
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.absolute().parent))
    folder.chmod(0o755)
    try:
        yield folder
        if not (folder / MANIFEST).is_file():
            raise BundleError("no manifest was written")
        _replace(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def seal(folder: Path, make: Callable[[tuple[FileEntry, ...]], Manifest]) -> Manifest:
    """Hash every file in `folder`, let `make` build the manifest from the entries, write it, and give it back."""
    entries = []
    for relative in sorted(_walk(folder)):
        if relative != MANIFEST:
            path = folder / relative
            entries.append(FileEntry(relative, path.stat().st_size, hash_file(path)))
    manifest = make(tuple(entries))
    write_manifest(folder, manifest)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace the manifest of a bundle, whole or not at all."""
    data = manifests.dumps(manifest)
    if len(data) > manifests.MAX_BYTES:
        raise ManifestError(f"{MANIFEST}: {len(data)} bytes; at most {manifests.MAX_BYTES} are allowed")
    with whole_file(folder / MANIFEST) as partial:
        partial.write_bytes(data)


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace(folder: Path, target: Path) -> None:
    if not target.exists():
        folder.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.absolute().parent))
    try:
        target.rename(old / target.name)
        folder.rename(target)
    except BaseException:
        if not target.exists():
            (old / target.name).rename(target)
        raise
    finally:
        shutil.rmtree(old)


def _walk(folder: Path) -> Iterator[str]:
    for base, folders, files in os.walk(folder):
        for name in files:
            yield (Path(base) / name).relative_to(folder).as_posix()
        for name in folders:
            if (Path(base) / name).is_symlink():
                raise IntegrityError(f"{name}: a linked folder; a bundle holds regular files only")
