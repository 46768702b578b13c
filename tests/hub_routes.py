"""What the local Hub answers to each request that the client libraries make."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hub_http import Request, Response, as_json, route
from hub_repos import DATE, GITATTRIBUTES, Blob, Commit, HubError, Repository, is_large

if TYPE_CHECKING:
    from hub_server import HubServer, Token

# Who may do what


def caller(hub: HubServer, request: Request) -> Token | None:
    """The token of a request, None without; one that the Hub does not know is refused even for public files."""
    authorization = request.headers.get("Authorization")
    if authorization is None:
        return None
    token = hub.tokens.get(authorization.removeprefix("Bearer "))
    if token is None:
        raise HubError(401, None, "Invalid credentials in Authorization header")
    return token


def readable(hub: HubServer, request: Request, kind: str, repo: str) -> Repository:
    """The repository, unless it is not there or hidden from the caller, which look alike."""
    token = caller(hub, request)
    repository = hub.repositories.get((kind, repo))
    if repository is None or (repository.private and not hub.trusts(token, repository.id)):
        raise _no_such_repository(token)
    return repository


def _no_such_repository(token: Token | None) -> HubError:
    # Without a token the Hub sends no code and clients conclude it from 401, but only of addresses with https.
    if token is None:
        return HubError(401, "RepoNotFound", "Invalid username or password.")
    return HubError(404, "RepoNotFound", "Repository not found")


def check_gate(hub: HubServer, request: Request, repository: Repository) -> None:
    token = caller(hub, request)
    if not repository.gated or hub.trusts(token, repository.id):
        return
    restricted = f"Access to {repository.kind} {repository.id} is restricted"
    if token is None:
        raise HubError(
            401,
            "GatedRepo",
            f"{restricted}. You must have access to it and be authenticated to access it. Please log in.",
        )
    raise HubError(
        403,
        "GatedRepo",
        f"{restricted} and you are not in the authorized list."
        f" Visit {hub.endpoint}/{repository.url_path} to ask for access.",
    )


def check_write(hub: HubServer, request: Request, repo: str) -> None:
    token = caller(hub, request)
    if token is None:
        raise _no_such_repository(token)
    if not token.write:
        raise HubError(403, None, "you must use a write token to upload to a repository")
    if not hub.trusts(token, repo):
        raise HubError(403, None, f'You don\'t have the rights to write under the namespace "{repo.split("/")[0]}"')


def writable(hub: HubServer, request: Request, kind: str, repo: str) -> Repository:
    repository = readable(hub, request, kind, repo)
    check_write(hub, request, repo)
    return repository


@route("GET", "/api/whoami-v2")
def whoami(hub: HubServer, request: Request) -> Response:
    token = caller(hub, request)
    if token is None:
        raise HubError(401, None, "Invalid username or password.")
    access = {"displayName": "tests", "role": "write" if token.write else "read"}
    return as_json({"type": "user", "name": token.user, "orgs": [], "auth": {"accessToken": access}})


# Reading


@route("GET", "/api/{kind}/{repo}")
@route("GET", "/api/{kind}/{repo}/revision/{revision}")
def info(hub: HubServer, request: Request, kind: str, repo: str, revision: str = "main") -> Response:
    repository = readable(hub, request, kind, repo)
    commit = repository.at(revision)
    return as_json(
        {
            "id": repository.id,
            "author": repository.namespace,
            "sha": commit.id,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": repository.private,
            "gated": "manual" if repository.gated else False,
            "disabled": False,
            "tags": [],
            "downloads": 0,
            "likes": 0,
            "siblings": [_sibling(path, blob, request.asks_for("blobs")) for path, blob in commit.files.items()],
        }
    )


def _sibling(path: str, blob: Blob, detailed: bool) -> dict[str, Any]:
    if not detailed:
        return {"rfilename": path}
    large = {"lfs": {"sha256": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}}
    return {"rfilename": path, "size": len(blob.data), "blobId": blob.git_id, **(large if blob.lfs else {})}


@route("GET", "/api/{kind}/{repo}/auth-check")
def auth_check(hub: HubServer, request: Request, kind: str, repo: str) -> Response:
    check_gate(hub, request, readable(hub, request, kind, repo))
    return as_json({})


@route("GET", "/api/{kind}/{repo}/refs")
def refs(hub: HubServer, request: Request, kind: str, repo: str) -> Response:
    repository = readable(hub, request, kind, repo)

    def listed(named: Mapping[str, str], prefix: str) -> list[dict[str, str]]:
        return [{"name": name, "ref": prefix + name, "targetCommit": commit} for name, commit in named.items()]

    branches, tags = listed(repository.branches, "refs/heads/"), listed(repository.tags, "refs/tags/")
    return as_json({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})


@route("GET", "/api/{kind}/{repo}/tree/{revision}")
@route("GET", "/api/{kind}/{repo}/tree/{revision}/{path}")
def tree(hub: HubServer, request: Request, kind: str, repo: str, revision: str, path: str = "") -> Response:
    commit = readable(hub, request, kind, repo).at(revision)
    entries = commit.listing(path, request.asks_for("recursive"))
    start = int(request.query.get("cursor", 0))
    end = start + hub.page_size
    headers = {}
    if end < len(entries):
        options = f"recursive={request.asks_for('recursive')}&expand={request.asks_for('expand')}"
        headers["Link"] = f'<{hub.endpoint}{request.path}?{options}&cursor={end}>; rel="next"'
    return as_json(_entries(request.asks_for("expand"), commit, entries[start:end]), headers=headers)


@route("POST", "/api/{kind}/{repo}/paths-info/{revision}")
def paths_info(hub: HubServer, request: Request, kind: str, repo: str, revision: str) -> Response:
    commit = readable(hub, request, kind, repo).at(revision)
    found = [entry for path in request.form.get("paths", []) if (entry := commit.describe(path)) is not None]
    return as_json(_entries(request.form.get("expand", [""])[-1].lower() == "true", commit, found))


def _entries(expand: bool, commit: Commit, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = {"lastCommit": {"id": commit.id, "title": commit.title, "date": DATE}} if expand else {}
    return [entry | last for entry in entries]


@route("GET", "/{repo}/resolve/{revision}/{path}", kind="model")
@route("GET", "/datasets/{repo}/resolve/{revision}/{path}", kind="dataset")
def resolve(hub: HubServer, request: Request, kind: str, repo: str, revision: str, path: str) -> Response:
    """A file itself, or where the CDN has it."""
    repository = readable(hub, request, kind, repo)
    check_gate(hub, request, repository)
    commit = repository.at(revision)
    blob = commit.file(path)
    headers = {"X-Repo-Commit": commit.id}
    if not blob.lfs:
        return content(request, blob, headers, (repo, path))
    headers |= {"X-Linked-Size": str(len(blob.data)), "X-Linked-ETag": f'"{blob.etag}"'}
    headers["Location"] = f"{hub.cdn}/cdn/{repo}/{blob.sha256}/{quote(path)}"
    return Response(302, f"Found. Redirecting to {headers['Location']}".encode(), headers)


@route("GET", "/cdn/{repo}/{sha256}/{path}")
def cdn(hub: HubServer, request: Request, repo: str, sha256: str, path: str) -> Response:
    """A large file; the address is all that one needs to know, as with the signed ones of the Hub."""
    return content(request, hub.large_files[sha256], {}, (repo, path))


def content(request: Request, blob: Blob, headers: Mapping[str, str], file: tuple[str, str]) -> Response:
    """The bytes of a file, or the range of them that was asked for."""
    headers = {"ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes", **headers}
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
    size = len(blob.data)
    if asked is None or not any(asked.groups()):
        return Response(200, blob.data, headers, file)
    first, last = (int(number) if number else None for number in asked.groups())
    if first is None:
        first, last = max(0, size - last), None
    if first >= size:
        raise HubError(416, None, "Range Not Satisfiable", {"Content-Range": f"bytes */{size}"})
    end = size if last is None else min(last + 1, size)
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{size}"
    return Response(206, blob.data[first:end], headers, file)


# Writing


@route("POST", "/api/repos/create")
def create_repository(hub: HubServer, request: Request) -> Response:
    wanted = request.json
    token = caller(hub, request)
    kind = wanted.get("type") or "model"
    repo = f"{wanted.get('organization') or (token.user if token else '')}/{wanted['name']}"
    check_write(hub, request, repo)
    status = 409 if (kind, repo) in hub.repositories else 200
    if status == 200:
        private = wanted.get("private") or wanted.get("visibility") == "private"
        hub.repositories[kind, repo] = repository = Repository(kind, repo, private=bool(private))
        repository.commit("main", {".gitattributes": Blob(GITATTRIBUTES)}, "initial commit")
    path = hub.repositories[kind, repo].url_path
    taken = {"error": f"You already created this {kind} repo"} if status == 409 else {}
    return as_json({"url": f"{hub.endpoint}/{path}", "name": repo, **taken}, status)


@route("POST", "/api/validate-yaml")
def validate_yaml(hub: HubServer, request: Request) -> Response:
    """Every model card is fine."""
    return as_json({"errors": [], "warnings": []})


@route("POST", "/api/{kind}/{repo}/preupload/{revision}")
def preupload(hub: HubServer, request: Request, kind: str, repo: str, revision: str) -> Response:
    """How each file is to be sent, and which content it has now."""
    commit = writable(hub, request, kind, repo).at(revision)

    def plan(path: str, size: int) -> dict[str, Any]:
        now = commit.files.get(path)
        mode = "lfs" if is_large(path, size, hub.lfs_threshold) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": now and now.etag}

    return as_json({"files": [plan(file["path"], file["size"]) for file in request.json["files"]]})


@route("POST", "/{repo}.git/info/lfs/objects/batch", kind="model")
@route("POST", "/datasets/{repo}.git/info/lfs/objects/batch", kind="dataset")
def lfs_batch(hub: HubServer, request: Request, kind: str, repo: str) -> Response:
    """Where to put each large file that the Hub does not have."""
    writable(hub, request, kind, repo)

    def plan(wanted: dict[str, Any]) -> dict[str, Any]:
        known = wanted["oid"] in hub.large_files
        upload = {"actions": {"upload": {"href": f"{hub.cdn}/cdn/upload/{wanted['oid']}"}}}
        return {"oid": wanted["oid"], "size": wanted["size"], **({} if known else upload)}

    return as_json({"transfer": "basic", "objects": [plan(wanted) for wanted in request.json["objects"]]})


@route("PUT", "/cdn/upload/{sha256}")
def upload(hub: HubServer, request: Request, sha256: str) -> Response:
    blob = Blob(request.body, lfs=True)
    if blob.sha256 != sha256:
        raise HubError(400, None, f"{len(request.body)} bytes came, and they are not {sha256}")
    hub.large_files[sha256] = blob
    return Response()


@route("POST", "/api/{kind}/{repo}/commit/{revision}")
def commit(hub: HubServer, request: Request, kind: str, repo: str, revision: str) -> Response:
    """Put a commit on a branch: a header and one operation a line, as JSON."""
    repository = writable(hub, request, kind, repo)
    if revision not in repository.branches:
        raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
    header, *operations = (json.loads(line) for line in request.body.splitlines())
    current = repository.at(revision)
    if header["value"].get("parentCommit", current.id) != current.id:
        raise HubError(412, None, "A commit has happened since. Please refresh and try again.")
    files = dict(current.files)
    for operation in operations:
        _OPERATIONS[operation["key"]](hub, files, operation["value"])
    made = repository.commit(revision, files, header["value"]["summary"])
    url = f"{hub.endpoint}/{repository.url_path}/commit/{made.id}"
    return as_json({"success": True, "commitOid": made.id, "commitUrl": url})


def _add(hub: HubServer, files: dict[str, Blob], value: dict[str, Any]) -> None:
    files[value["path"]] = Blob(base64.b64decode(value["content"]))


def _add_large(hub: HubServer, files: dict[str, Blob], value: dict[str, Any]) -> None:
    if value["oid"] not in hub.large_files:
        raise HubError(400, None, f"Your push was rejected because {value['path']} was never uploaded")
    files[value["path"]] = hub.large_files[value["oid"]]


def _delete(hub: HubServer, files: dict[str, Blob], value: dict[str, Any]) -> None:
    if files.pop(value["path"], None) is None:
        raise HubError(404, "EntryNotFound", f"A file with this name doesn't exist: {value['path']}")


def _delete_folder(hub: HubServer, files: dict[str, Blob], value: dict[str, Any]) -> None:
    for path in [path for path in files if path.startswith(value["path"].rstrip("/") + "/")]:
        del files[path]


_OPERATIONS = {"file": _add, "lfsFile": _add_large, "deletedFile": _delete, "deletedFolder": _delete_folder}


@route("POST", "/api/{kind}/{repo}/branch/{name}")
def create_branch(hub: HubServer, request: Request, kind: str, repo: str, name: str) -> Response:
    repository = writable(hub, request, kind, repo)
    if name in repository.branches:
        raise HubError(409, None, f"Reference already exists: refs/heads/{name}")
    repository.branches[name] = repository.at(request.json.get("startingPoint", "main")).id
    return as_json({})


@route("POST", "/api/{kind}/{repo}/tag/{revision}")
def create_tag(hub: HubServer, request: Request, kind: str, repo: str, revision: str) -> Response:
    repository = writable(hub, request, kind, repo)
    name = request.json["tag"]
    if name in repository.tags:
        raise HubError(409, None, f"Tag reference exists already: refs/tags/{name}")
    repository.tags[name] = repository.at(revision).id
    return as_json({})
