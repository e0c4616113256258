"""A Hugging Face Hub on the loopback: the few routes that huggingface_hub and datasets ask for.

Repositories are read, made, and committed to; large files come by LFS, as one PUT each.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from testkit.listening import listening

Files = dict[str, bytes]


class Hub:
    """Repositories by kind and id; each commit is kept, `main` is the last."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, Files]] = {}
        self.refs: dict[tuple[str, str], dict[str, str]] = {}
        self.gated: set[str] = set()
        self.cuts: dict[str, list[int]] = {}
        """Of a file: after how many bytes the connection is cut, once for each number."""
        self.on_file: dict[str, Callable[[], object]] = {}
        """Of a file: what happens before its bytes are sent."""
        self.accepts_pushes = False
        """Whether anybody may make repositories and commits."""
        self.visibility: dict[str, str | None] = {}
        """Who may see a repository, by its id, as asked for when it was made."""
        self.large: dict[str, bytes] = {}
        """Files that came by LFS, by hash."""
        self.requests: list[str] = []
        """Method, path and range of each request."""
        self.url = ""

    def put(self, name: str, files: Files, kind: str = "models") -> str:
        """Make a commit of these files, and let main be it."""
        text = repr((name, sorted(files.items()), len(self.commits.get((kind, name), ()))))
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.commits.setdefault((kind, name), {})[commit] = files
        self.refs.setdefault((kind, name), {})["main"] = commit
        return commit

    def fetched(self) -> list[str]:
        """Return the files whose bytes were asked for, in order."""
        return [
            line.split()[1].rpartition("/")[2]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._body = self._received()
        if not self._push():
            self._serve()

    def do_PUT(self) -> None:
        data = self._received()
        self.hub.requests.append(f"PUT {self.path}")
        self.hub.large[hashlib.sha256(data).hexdigest()] = data
        self._json({})

    def log_message(self, *_: object) -> None: ...

    def _received(self) -> bytes:
        """Return the body of a request, also one that comes in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _push(self) -> bool:
        """Answer what a push asks for; return whether it was that."""
        parts = urlsplit(self.path).path.strip("/").split("/")
        is_batch, is_creation = parts[-1] == "batch", parts == ["api", "repos", "create"]
        is_commit = len(parts) > 4 and parts[-2] in ("preupload", "commit")
        if parts == ["api", "validate-yaml"]:
            self._json({"warnings": [], "errors": []})
            return True
        if not (is_batch or is_creation or is_commit):
            return False
        self.hub.requests.append(f"POST {'/'.join(parts)}")
        if not self.hub.accepts_pushes:
            self._refuse(401, "")
        elif is_creation:
            asked = json.loads(self._body)
            name = f"{asked['organization']}/{asked['name']}"
            if ("models", name) not in self.hub.commits:
                self.hub.put(name, {})
                self.hub.visibility[name] = asked.get("visibility")
            self._json({"url": f"{self.hub.url}/{name}"})
        elif is_batch:
            self._json({"objects": [self._batch(one) for one in json.loads(self._body)["objects"]]})
        elif parts[-2] == "preupload":
            files = json.loads(self._body)["files"]
            modes = [(f["path"], _mode(f["path"])) for f in files]
            answer = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]
            self._json({"files": answer})
        else:
            self._commit("/".join(parts[2:-2]))
        return True

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        href = f"{self.hub.url}/lfs/{asked['oid']}"
        return {**asked, "actions": {"upload": {"href": href}}}

    def _commit(self, name: str) -> None:
        repo = self.hub.commits["models", name]
        files = dict(repo[self.hub.refs["models", name]["main"]])
        for line in self._body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "lfsFile":
                files[entry["value"]["path"]] = self.hub.large[entry["value"]["oid"]]
        commit = self.hub.put(name, files)
        address = f"{self.hub.url}/{name}/commit/{commit}"
        self._json({"commitUrl": address, "commitOid": commit})

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        parts = path.split("/")
        is_api = parts[0] == "api"
        kind = parts[1] if is_api else "datasets" if parts[0] == "datasets" else "models"
        rest = parts[2:] if is_api else parts[1:] if kind == "datasets" else parts
        words = ("revision", "tree", "paths-info", "resolve")
        cut = next((i for i, part in enumerate(rest) if i and part in words), len(rest))
        name, route, tail = "/".join(rest[:cut]), rest[cut : cut + 1], rest[cut + 1 :]
        if name in self.hub.gated:
            self._refuse(401, "GatedRepo")
        elif (kind, name) not in self.hub.commits:
            self._refuse(401 if is_api else 404, "RepoNotFound")
        else:
            self._answer(kind, name, route[0] if route else "revision", tail)

    def _answer(self, kind: str, name: str, route: str, tail: list[str]) -> None:
        asked = tail[0] if tail else "main"
        commit = self.hub.refs[kind, name].get(asked, asked)
        files = self.hub.commits[kind, name].get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound")
        elif route == "revision":
            siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
            self._json({"id": name, "sha": commit, "siblings": siblings})
        elif route == "tree":
            under = "/".join(tail[1:])
            self._tree(files, under)
        elif route == "paths-info":
            wanted = json.loads(self._body)["paths"]
            self._json([_entry(path, files[path]) for path in wanted if path in files])
        else:
            self._file("/".join(tail[1:]), files, commit)

    def _tree(self, files: Files, under: str) -> None:
        inside = {path: data for path, data in files.items() if path.startswith(under)}
        if under and not inside:
            self._refuse(404, "EntryNotFound")
            return
        folders = {path.rpartition("/")[0] for path in inside} - {"", under}
        found = [{"type": "directory", "path": path, "size": 0, "oid": "0"} for path in folders]
        self._json(found + [_entry(path, data) for path, data in inside.items()])

    def _file(self, name: str, files: Files, commit: str) -> None:
        if name not in files:
            self._refuse(404, "EntryNotFound", commit)
            return
        data, begin = files[name], 0
        if wanted := self.headers.get("Range"):
            begin = int(wanted.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - begin))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.on_file.get(name, bool)()
        if cuts := self.hub.cuts.get(name):
            self.wfile.write(data[begin : begin + cuts.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(data[begin:])

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data if self.command != "HEAD" else b"")

    def _refuse(self, status: int, code: str, commit: str = "") -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} of the loopback")
        if commit:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _mode(path: str) -> str:
    """Return how a file is to come."""
    return "lfs" if path.endswith(".safetensors") else "regular"


def _entry(path: str, data: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": path, "size": len(data), "oid": oid}


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a Hub on a free port."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with listening(handler) as address:
        hub.url = address
        yield hub


def use(monkeypatch: pytest.MonkeyPatch, url: str, cache: str) -> None:
    """Let huggingface_hub ask `url` and keep what it gets in `cache`, as its own settings would."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # which is no HTTP of its own


def use_for_datasets(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Let datasets ask `url` too."""
    import datasets

    from megatrain.data.rows import hub_rows

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "USE_PARQUET_EXPORT", False)
    datasets.disable_progress_bars()
    hub_rows._dataset.cache_clear()
