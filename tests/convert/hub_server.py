"""Stand-in of the Hugging Face Hub on loopback, with one repository."""

import base64
import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class HubServer:
    """State of the stand-in: commits as files by name, branches as lists of commits."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, list[str]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS files by SHA-256
    calls: list[str] = field(default_factory=list)
    url: str = ""
    private: bool | None = None  # None: there is no repository
    writable: bool = True
    ignored: tuple[str, ...] = ()  # names in .gitignore
    fail_at: str = ""  # requests that have this text are answered by an error of the server

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        name = hashlib.sha1(f"{branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[name] = files
        self.branches.setdefault(branch, []).append(name)
        return name

    def files(self, revision: str) -> dict[str, bytes]:
        """Return the files of a branch or commit."""
        return self.commits[self.branches[revision][-1] if revision in self.branches else revision]

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        """Return status and content of the answer: bytes, or values for JSON."""
        if self.fail_at and self.fail_at in f"{method} {path}":
            return 500, {"error": "the stand-in fails"}
        if method == "PUT":
            self.objects[path.removeprefix("/lfs/")] = body
            return 200, b""
        if path == "/api/repos/create":
            answer = {"url": f"{self.url}/me/model"}
            if self.private is not None:
                return 409, answer | {"error": "exists already"}
            if not self.writable:
                return 403, {"error": "no rights in this namespace"}
            self.private = json.loads(body)["visibility"] == "private"
            self.commit("main", {".gitattributes": b""})
            return 200, answer
        if path == "/api/validate-yaml":
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for item in objects:
                if item["oid"] not in self.objects:
                    item["actions"] = {"upload": {"href": f"{self.url}/lfs/{item['oid']}"}}
            return 200, {"objects": objects}
        action, _, revision = path.removeprefix("/api/models/me/model/").partition("/")
        revision = unquote(revision.split("/")[0])
        if action == "auth-check":
            return (200, b"") if self.writable else (403, {"error": "no right to write"})
        if action == "refs":
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commits[-1]}
                for name, commits in self.branches.items()
            ]
            return 200, {"branches": branches, "converts": [], "tags": []}
        if action == "branch":
            if revision in self.branches:
                return 409, {"error": "exists already"}
            self.branches[revision] = [json.loads(body)["startingPoint"]]
            return 200, b""
        if revision not in self.branches and revision not in self.commits:
            return 404, {"error": "no such revision"}
        files = self.files(revision)
        if action == "tree":
            return 200, [
                {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
                for name, content in files.items()
            ]
        if action == "commits":
            commits = [
                {"id": name, "authors": [], "date": "2026-01-01T00:00:00.000Z"}
                | {"title": "", "message": ""}
                for name in reversed(self.branches[revision])
            ]
            return 200, commits
        if action == "preupload":
            answers = []
            for item in json.loads(body)["files"]:
                is_lfs = item["path"].endswith(".safetensors")
                content = files.get(item["path"])
                sha = hashlib.sha256(content).hexdigest() if content and is_lfs else None
                oid = _git_hash(content) if content and not is_lfs else sha
                answer = {"path": item["path"], "oid": oid}
                answer["uploadMode"] = "lfs" if is_lfs else "regular"
                answer["shouldIgnore"] = item["path"] in self.ignored
                answers.append(answer)
            return 200, {"files": answers}
        assert action == "commit", path
        files = dict(files)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                if value.get("parentCommit") != self.branches[revision][-1]:
                    return 412, {"error": "A commit has happened since"}
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        name = self.commit(revision, files)
        return 200, {"commitUrl": f"{self.url}/me/model/commit/{name}", "commitOid": name}


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def serve():
    """Serve a HubServer without a repository on loopback, and yield it."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self):
            path = urlsplit(self.path).path
            hub.calls.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {}
            name = path.partition("/resolve/")[2]
            if self.headers.get("Authorization") != "Bearer right" and self.command != "PUT":
                status = 401
                content = {"error": "wrong token"}
            elif name:
                revision, _, name = name.partition("/")
                files = hub.files(revision)
                headers["X-Repo-Commit"] = hub.branches.get(revision, [revision])[-1]
                status = 200 if name in files else 404
                content = files.get(name, b"")
                if name in files:
                    headers["ETag"] = f'"{_git_hash(content)}"'
                else:
                    headers["X-Error-Code"] = "EntryNotFound"
            else:
                status, content = hub.answer(self.command, path, body)
            if not isinstance(content, bytes):
                content = json.dumps(content).encode()
                headers["Content-Type"] = "application/json"
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = do_POST = do_PUT = handle_request

        def log_message(self, *given):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
