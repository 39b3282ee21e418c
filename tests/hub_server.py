"""A Hub for the tests: the endpoints that the real `huggingface_hub` client calls, in memory, standard library only.

Users are `alice` and `bob`, their tokens `hf_alice` and `hf_bob`. `*.safetensors` and `*.onnx` are LFS files, all the
others regular. `requests` lists every call as `(method, path)`; with `fail_after = n` every call after the next `n` is
answered 507, which the client does not try again. As a command it runs another one against a Hub of its own:

    python tests/hub_server.py -- python examples/04_hub_round_trip.py alice/raptor
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".onnx")
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "cc-by-nc-4.0", "other"}


@dataclass
class Repo:
    private: bool
    trees: dict = field(default_factory=dict)  # commit -> {path: blob}
    messages: dict = field(default_factory=dict)  # commit -> (title, description, parent)
    refs: dict = field(default_factory=dict)  # revision -> commit

    def commit(self, revision, tree, title, description=""):
        parent = self.refs.get(revision)
        oid = hashlib.sha1(json.dumps([sorted(tree), title, len(self.trees)]).encode()).hexdigest()
        self.trees[oid], self.messages[oid], self.refs[revision] = tree, (title, description, parent), oid
        return oid

    def history(self, revision):
        oid = self.refs.get(revision, revision)
        while oid in self.messages:
            yield oid
            oid = self.messages[oid][2]


class Hub(ThreadingHTTPServer):
    """`with Hub() as hub:` serves `hub.endpoint` from a thread."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos, self.blobs, self.requests, self.fail_after = {}, {}, [], None
        self.daemon_threads = True

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def environment(self, home, token="hf_alice", endpoint=None):
        """Environment of a fresh client process: its own home and caches, no token of the machine."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        settings = {"HF_ENDPOINT": endpoint or self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        settings.update(HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_DISABLE_TELEMETRY="1", OMP_NUM_THREADS="1")
        return kept | settings | ({"HF_TOKEN": token} if token else {})


class Answer(Exception):
    """What a route answers instead of 200."""

    def __init__(self, status, code=None, message="", **content):
        super().__init__(message)
        self.status, self.code, self.content = status, code, {"error": message, **content}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    routes = (
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>.+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>.+)", "commit"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>.+)", "branch"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/commits/(?P<revision>.+)", "commits"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>.+))?", "info"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "lfs"),
        ("PUT", r"/blobs/(?P<oid>\w+)", "put"),
        ("HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        try:
            if url.path.startswith("/fail-after/"):  # for a client that cannot reach into this object
                number = url.path.split("/")[-1]
                self.server.fail_after = int(number) if number.isdigit() else None
                return self.reply(200, {})
            if self.server.fail_after is not None:
                self.server.fail_after -= 1
                if self.server.fail_after < 0:
                    raise Answer(507, message="the Hub is full")
            for method, pattern, name in self.routes:
                match = re.fullmatch(pattern, url.path)
                if match and method == self.command:
                    groups = {key: unquote(value) for key, value in match.groupdict().items() if value}
                    return self.reply(200, *getattr(self, name)(body, **groups))
            raise Answer(404, message=f"no route for {self.command} {url.path}")
        except Answer as answer:
            headers = {"X-Error-Code": answer.code} if answer.code else {}
            return self.reply(answer.status, answer.content, headers)

    do_HEAD = do_POST = do_PUT = do_GET

    def reply(self, status, content, headers=()):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def user(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in ("hf_alice", "hf_bob"):
            raise Answer(401, message="Invalid credentials in Authorization header")
        return token.removeprefix("hf_") or None

    def repo(self, repo, revision="main", write=False):
        """The repository, its commit, its tree, if the caller may see (or write) it."""
        user, found = self.user(), self.server.repos.get(repo)
        if found is None or (found.private and user != repo.split("/")[0]):
            raise Answer(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and user != repo.split("/")[0]:
            raise Answer(403, message="Forbidden: no write access")
        oid = found.refs.get(revision, revision)
        if oid not in found.trees:
            raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found, oid, found.trees[oid]

    def whoami(self, body):
        user = self.user()
        if user is None:
            raise Answer(401, message="Invalid username or password.")
        return ({"type": "user", "name": user, "fullname": user, "orgs": [], "auth": {"type": "access_token"}},)

    def create(self, body):
        wanted, user = json.loads(body), self.user()
        owner = wanted.get("organization") or user
        if user is None or owner != user:
            raise Answer(401 if user is None else 403, message=f"You don't have the rights to create under {owner}")
        name, url = f"{owner}/{wanted['name']}", f"{self.server.endpoint}/{owner}/{wanted['name']}"
        if name in self.server.repos:
            raise Answer(409, message="You already created this model repo", url=url)
        repo = self.server.repos[name] = Repo(wanted.get("private", wanted.get("visibility") == "private"))
        repo.commit("main", {}, "initial commit")
        return ({"url": url, "name": name, "id": name},)

    def validate(self, body):
        content = json.loads(body)["content"]
        match = re.match(r"---\n(.*?)\n---", content, re.DOTALL)
        data = yaml.safe_load(match[1]) if match else {}
        errors = []
        if "license" in data and data["license"] not in LICENSES:
            errors.append(f'"license" must be one of {sorted(LICENSES)}')
        for key in ("base_model", "datasets"):
            values = data.get(key) or []
            for value in [values] if isinstance(values, str) else values:
                if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value) or value.startswith("."):
                    errors.append(f'"{key}" with value "{value}" is not valid. Use a model id from hf.co/models.')
        if errors:
            raise Answer(400, message="; ".join(errors))
        return ({"errors": [], "warnings": []},)

    def preupload(self, body, repo, revision):
        _, _, tree = self.repo(repo, revision, write=not self.query.get("create_pr"))
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
                "oid": tree.get(file["path"]),
            }
            for file in json.loads(body)["files"]
        ]
        return ({"files": files},)

    def lfs(self, body, repo):
        self.repo(repo, write=True)
        objects = []
        for wanted in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.server.endpoint}/blobs/{wanted['oid']}"}}
            objects.append(wanted | ({} if wanted["oid"] in self.server.blobs else {"actions": upload}))
        return ({"transfer": "basic", "objects": objects},)

    def put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            raise Answer(400, message="the bytes do not have this sha256")
        self.server.blobs[oid] = body
        return (b"",)

    def commit(self, body, repo, revision):
        found, _, tree = self.repo(repo, revision, write=True)
        lines = [json.loads(line) for line in body.decode().splitlines() if line]
        header = next(line["value"] for line in lines if line["key"] == "header")
        tree = dict(tree)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                data = base64.b64decode(value["content"])
                oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                self.server.blobs[oid], tree[value["path"]] = data, oid
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.server.blobs:
                    raise Answer(400, message="LFS pointer to a blob that was not uploaded")
                tree[value["path"]] = value["oid"]
            elif line["key"] == "deletedFile":
                tree.pop(value["path"], None)
        answer = {}
        if self.query.get("create_pr"):
            number = 1 + sum(name.startswith("refs/pr/") for name in found.refs)
            found.refs[f"refs/pr/{number}"] = found.refs[revision]
            revision = f"refs/pr/{number}"
            answer["pullRequestUrl"] = f"{self.server.endpoint}/{repo}/discussions/{number}"
        oid = found.commit(revision, tree, header["summary"], header.get("description", ""))
        url = f"{self.server.endpoint}/{repo}/commit/{oid}"
        return ({"success": True, "commitOid": oid, "commitUrl": url, **answer},)

    def branch(self, body, repo, revision):
        start = json.loads(body or b"{}").get("startingPoint", "main")
        found, oid, _ = self.repo(repo, start, write=True)
        if revision in found.refs:
            raise Answer(409, message="Reference already exists")
        found.refs[revision] = oid
        return ({},)

    def tree(self, body, repo, revision):
        _, _, tree = self.repo(repo, revision)
        return ([self.entry(path, oid) for path, oid in tree.items()],)

    def entry(self, path, oid):
        size, is_lfs = len(self.server.blobs[oid]), path.endswith(LFS_SUFFIXES)
        lfs = {"lfs": {"oid": oid, "size": size, "pointerSize": 134}} if is_lfs else {}
        return {"type": "file", "path": path, "oid": oid, "size": size, **lfs}

    def commits(self, body, repo, revision):
        found, oid, _ = self.repo(repo, revision)
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        history = [
            {"id": commit, "authors": [{"user": repo.split("/")[0]}], "date": date,
             "title": found.messages[commit][0], "message": found.messages[commit][1]}
            for commit in found.history(oid)
        ]  # fmt: skip
        return (history,)

    def info(self, body, repo, revision="main"):
        found, oid, tree = self.repo(repo, revision)
        siblings = [{"rfilename": path} for path in tree]
        return ({"id": repo, "modelId": repo, "sha": oid, "private": found.private, "tags": [], "siblings": siblings},)

    def resolve(self, body, repo, revision, path):
        _, commit, tree = self.repo(repo, revision)
        headers = {"X-Repo-Commit": commit}
        if path not in tree:
            raise Answer(404, "EntryNotFound", "Entry not found")
        data = self.server.blobs[tree[path]]
        headers["ETag"] = f'"{tree[path]}"'
        if path.endswith(LFS_SUFFIXES):
            headers |= {"X-Linked-Etag": f'"{tree[path]}"', "X-Linked-Size": str(len(data))}
        return data, headers


def main(arguments):
    """Runs a command against a Hub of its own, as `alice`, and returns its exit status."""
    with Hub() as hub, tempfile.TemporaryDirectory() as home:
        command = arguments[1:] if arguments[:1] == ["--"] else arguments
        return subprocess.run(command, env=hub.environment(home), check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
