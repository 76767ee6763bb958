"""Compiles the C++ part of the torch backend for the releases of torch, for the wheel.

    python3 src/python/shims.py [--only MINOR[,MINOR...]]

Writes package/convoke_dist/torch/shims/MINOR.so.xz. Downloads torch's headers (9 MB for each minor), a piece of the wheel
on the package index (PIP_INDEX_URL, else PyPI), and keeps them and the parts below target/shims. Needs g++ 11 or newer.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import http.client
import importlib.util
import io
import json
import lzma
import os
import pathlib
import platform
import re
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile

ROOT = pathlib.Path(__file__).parent
BACKEND = ROOT / "package" / "convoke_dist" / "torch"
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT.parent.parent / "target").resolve() / "shims"
# The newest release of each minor. All releases of a minor have one C++ interface.
RELEASES = ["2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"]
# What a part may ask of the machine: glibc as torch's own wheels, and the C++ library of GCC 11 (RHEL 9, Ubuntu 22.04).
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}

spec = importlib.util.spec_from_file_location("_compile", BACKEND / "_compile.py")
assert spec and spec.loader
compile_part = importlib.util.module_from_spec(spec)
spec.loader.exec_module(compile_part)


class Remote(io.RawIOBase):
    """A file on a web server, of which only what is read is fetched."""

    def __init__(self, url, size):
        self.url, self.size, self.position = url, size, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.position = (0, self.position, self.size)[whence] + offset
        return self.position

    def tell(self):
        return self.position

    def readinto(self, buffer):
        end = min(self.position + len(buffer), self.size)
        if end <= self.position:
            return 0
        data = fetch(self.url, Range=f"bytes={self.position}-{end - 1}")
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


@functools.cache
def certificates():
    """Returns the authorities that pip trusts: those of PIP_CERT, of the system, or of pip itself."""
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    if not context.cert_store_stats()["x509_ca"]:
        from pip._vendor import certifi

        context.load_verify_locations(certifi.where())
    return context


def fetch(url, **headers):
    """Returns what is at an address. It tries four times, as pip does: package indexes fail now and then."""
    request = urllib.request.Request(url, headers=headers)
    for wait in (1, 4, 16, None):
        try:
            with urllib.request.urlopen(request, timeout=120, context=certificates()) as answer:
                if "Range" in headers and answer.status != 206:
                    raise SystemExit(f"shims: {url}: the server sends no pieces of files")
                return answer.read()
        except (OSError, http.client.HTTPException):
            if wait is None:
                raise
            time.sleep(wait)


def wheels(index):
    """Returns the address and the size of torch's wheel of each release for this machine."""
    page = f"{index.rstrip('/')}/torch/"
    found = {}
    for file in json.loads(fetch(page, Accept="application/vnd.pypi.simple.v1+json"))["files"]:
        name = re.fullmatch(r"torch-([\d.]+)(-\d+)?-cp3\d+-cp3\d+-manylinux_2_28_(\w+)\.whl", file["filename"])
        if name and name[3] == platform.machine():
            found[name[1]] = (urllib.parse.urljoin(page, file["url"]), file["size"])
    return found


def headers(release, wheel):
    """Returns the folder of torch's headers."""
    folder = TARGET / "headers" / release
    if folder.exists():
        return folder / "torch" / "include"
    archive = zipfile.ZipFile(io.BufferedReader(Remote(*wheel), 1 << 22))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        # They stand in the wheel one after the other.
        members = [one for one in archive.infolist() if one.filename.startswith("torch/include/")]
        for member in sorted(members, key=lambda one: one.header_offset):
            archive.extract(member, made)
        pathlib.Path(made).chmod(0o755)
        os.rename(made, folder)
        os.mkdir(made)
    return folder / "torch" / "include"


def libraries(compiler):
    """Returns a folder with empty libraries of the names of torch's: the symbols are found when the part is loaded."""
    folder = TARGET / "empty"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("libc10.so", "libtorch_cpu.so"):
        command = [compiler, "-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, check=True)
    return folder


def check_needs(part):
    """Fails if the part would not load on a machine that it is for."""
    listed = subprocess.run(["objdump", "-T", str(part)], check=True, stdout=subprocess.PIPE, text=True).stdout
    for kind, number in re.findall(r"\((GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)", listed):
        if tuple(map(int, number.split("."))) > NEWEST[kind]:
            raise SystemExit(f"shims: {part} needs {kind}_{number}, which is newer than {NEWEST[kind]}")


def build(release, compiler, empty, key, wheel):
    """Returns the compressed part of a release."""
    digest = hashlib.sha256(f"{release}\n{key}".encode())
    kept = TARGET / f"{release}-{digest.hexdigest()[:24]}.so.xz"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=TARGET) as made:
            part = pathlib.Path(made) / "part.so"
            subprocess.run(compile_part.command(compiler, headers(release, wheel), empty, part), check=True)
            check_needs(part)
            packed = pathlib.Path(made) / kept.name
            packed.write_bytes(lzma.compress(part.read_bytes(), preset=9))
            os.rename(packed, kept)
    return kept.read_bytes()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="minors of torch, as 2.15")
    wanted = [minor for minor in parser.parse_args().only.split(",") if minor]
    releases = {release.rpartition(".")[0]: release for release in RELEASES}
    unknown = set(wanted) - set(releases)
    if unknown:
        raise SystemExit(f"shims: no release of torch is known for {', '.join(sorted(unknown))}; see RELEASES")
    compiler = compile_part.compiler()
    if compiler is None:
        raise SystemExit("shims: there is no C++ compiler: install g++")
    version = subprocess.run([compiler, "--version"], check=True, stdout=subprocess.PIPE, text=True).stdout
    sources = [path.read_text() for path in (*compile_part.SOURCES, BACKEND / "_compile.py")]
    key = "\n".join([version.splitlines()[0], platform.machine(), *sources])
    TARGET.mkdir(parents=True, exist_ok=True)
    empty, found = libraries(compiler), wheels(os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple"))
    folder = BACKEND / "shims"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.so.xz"):
        old.unlink()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = {
            minor: pool.submit(build, release, compiler, empty, key, found.get(release))
            for minor, release in releases.items()
            if not wanted or minor in wanted
        }
        for minor, part in parts.items():
            (folder / f"{minor}.so.xz").write_bytes(part.result())
            print(f"shims: torch {minor}", file=sys.stderr)


if __name__ == "__main__":
    main()
