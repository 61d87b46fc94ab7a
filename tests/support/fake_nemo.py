"""The NeMo services on two local ports: `with FakeNeMo() as nemo: nemo.entity_host, nemo.datastore_host`.

One port has Entity Store, Customizer and Deployment Management, the other the Data Store with the upload API of Hugging
Face (LFS for files of `lfs_bytes` and more), which takes models too, as the Hub does. Written from the requests and the
models of the SDKs. What a test asks for in addition:

    nemo.fail("jobs", 500, times=2)          answer the next two requests whose path has this in it with a status
    nemo.fail("POST .*/jobs$", lost=True)    carry a request out, then close the connection
    nemo.script = ["created", "running", ("running", 50), "completed"]   the states that polls of new jobs see, in order
    nemo.token = "other"                     refuse all other tokens at the Data Store from now on

A job fails, as at the service, if its dataset lacks training or validation records, or one of them is malformed.
"""

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

from aiohttp import web
from waiting import until

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
State = str | tuple[str, float | None] | None

CONFIG = "meta/llama-3.2-1b-instruct@v1.0.0+A100"
HYPERPARAMETERS = {"training_type", "finetuning_type", "epochs", "batch_size", "learning_rate", "seed", "dpo"}
FIELDS = {"dpo": ({"prompt", "chosen_response", "rejected_response"},), "sft": ({"prompt", "completion"}, {"messages"})}


@dataclass
class Fault:
    """What the next `times` requests that match `pattern` get."""

    pattern: str
    status: int
    times: int
    lost: bool
    page: str
    headers: dict[str, str]


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    visibility: str | None = None


class FakeNeMo:
    """`jobs`, `datasets`, `deployments` and `repositories` are what the services hold, by id or `namespace/name`."""

    def __init__(self, *, lfs_bytes: int = 10_000_000) -> None:
        self.lfs_bytes = lfs_bytes
        self.options = [
            {"training_type": kind, "finetuning_type": what, "num_gpus": 1, "micro_batch_size": 1}
            for kind, what in (("dpo", "all_weights"), ("sft", "all_weights"), ("sft", "lora"))
        ]
        self.clear()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.entity_host = self.datastore_host = ""

    def clear(self) -> None:
        """Forgets everything, faults and scripts too."""
        self.token = ""
        self.script: list[State] = ["created", ("running", None), ("running", 50), "completed"]
        self.deployment_script: list[str] = ["pending", "ready"]
        self.namespaces: dict[str, set[str]] = {"entities": set(), "datastore": set()}
        self.datasets: dict[str, dict[str, Any]] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.deployments: dict[str, dict[str, Any]] = {}
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.authorizations: set[tuple[str, str | None]] = set()
        self.faults: list[Fault] = []
        self._held, self.held = "nothing", 0
        self._released = threading.Event()

    def fail(
        self, pattern: str, status: int = 500, times: int = 1, *, lost: bool = False, page: str = "", **headers: str
    ) -> None:
        """`page`: the HTML that is sent instead of an error."""
        self.faults.append(Fault(pattern, status, times, lost, page, headers))

    def hold(self, pattern: str) -> None:
        """Carries out requests with this in their path without an answer, until `release`; `held` counts them."""
        self._held, self._released = pattern, threading.Event()

    def release(self) -> None:
        self._released.set()

    def requested(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, request)) for request in self.requests)

    def records(self, dataset: str, part: str) -> list[dict[str, Any]]:
        content = self.repositories[dataset].files[f"{part}/{part}_file.jsonl"]
        return [json.loads(line) for line in content.splitlines()]

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runners = []
        for name, routes in (("entity_host", self._entity_routes()), ("datastore_host", self._datastore_routes())):
            app = web.Application(client_max_size=2**26, middlewares=[self._with_faults])
            app.add_routes(routes)
            runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
            runners.append(runner)
            self._loop.run_until_complete(runner.setup())
            site = web.TCPSite(runner, "127.0.0.1", 0)
            self._loop.run_until_complete(site.start())
            setattr(self, name, f"http://127.0.0.1:{runner.addresses[0][1]}")
        self._ready.set()
        self._loop.run_forever()
        for runner in runners:
            self._loop.run_until_complete(runner.cleanup())

    @web.middleware
    async def _with_faults(self, request: web.Request, handler: Answer) -> web.StreamResponse:
        asked = f"{request.method} {request.path}"
        self.requests.append(asked)
        store = "datastore" if "/datastore/" in asked or "/v1/hf/" in asked else "entities"
        self.authorizations.add((store, request.headers.get("Authorization")))
        fault = next((f for f in self.faults if f.times > 0 and re.search(f.pattern, asked)), None)
        if fault is not None:
            fault.times -= 1
            if fault.lost:
                await handler(request)
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if fault.page:
                return web.Response(text=fault.page, content_type="text/html")
            body = {"error": {"message": f"made to fail with {fault.status}"}}
            return web.json_response(body, status=fault.status, headers=fault.headers)
        authorized = request.headers.get("Authorization") == f"Bearer {self.token}" or "/hf/lfs/" in request.path
        if store == "datastore" and self.token and not authorized:  # the addresses of LFS are signed
            return _refused(401, "the token has expired")
        response = await handler(request)
        if re.search(self._held, asked):
            self.held += 1
            await until(self._released.is_set)
        return response

    # Entity Store, Customizer, Deployment Management

    def _entity_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/namespaces", self._create_namespace),
            web.get("/v1/namespaces/{id}", self._namespace),
            web.post("/v1/datasets", self._create_dataset),
            web.get("/v1/datasets/{namespace}/{name}", self._dataset),
            web.get("/v1/customization/configs/{namespace}/{name}", self._config),
            web.post("/v1/customization/jobs", self._create_job),
            web.get("/v1/customization/jobs", self._list_jobs),
            web.get("/v1/customization/jobs/{id}", self._job),
            web.post("/v1/customization/jobs/{id}/cancel", self._cancel_job),
            web.post("/v1/deployment/model-deployments", self._create_deployment),
            web.get("/v1/deployment/model-deployments/{namespace}/{name}", self._deployment),
            web.delete("/v1/deployment/model-deployments/{namespace}/{name}", self._delete_deployment),
        ]

    async def _create_namespace(self, request: web.Request) -> web.Response:
        name = (await request.json())["id"]
        if name in self.namespaces["entities"]:
            return _refused(409, f"namespace {name} already exists")
        self.namespaces["entities"].add(name)
        return web.json_response({"id": name, "created_at": _now()})

    async def _namespace(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        known = name in self.namespaces["entities"]
        return web.json_response({"id": name}) if known else _refused(404, f"no namespace {name}")

    async def _create_dataset(self, request: web.Request) -> web.Response:
        body = await request.json()
        if (name := f"{body['namespace']}/{body['name']}") in self.datasets:
            return _refused(409, f"dataset {name} already exists")
        if body["namespace"] not in self.namespaces["entities"]:
            return _refused(404, f"no namespace {body['namespace']}")
        self.datasets[name] = {"id": f"dataset-{len(self.datasets)}", "created_at": _now(), **body}
        return web.json_response(self.datasets[name])

    async def _dataset(self, request: web.Request) -> web.Response:
        return _found(self.datasets, "{namespace}/{name}".format(**request.match_info))

    async def _config(self, request: web.Request) -> web.Response:
        name = "{namespace}/{name}".format(**request.match_info)
        config = {
            "namespace": "meta",
            "name": CONFIG.partition("/")[2],
            "max_seq_length": 64,
            "training_options": self.options,
        }
        return _found({CONFIG: config}, name)

    async def _create_job(self, request: web.Request) -> web.Response:
        body = await request.json()
        if any((job["namespace"], job["name"]) == (body["namespace"], body["name"]) for job in self.jobs.values()):
            return _refused(409, f"job {body['name']} already exists")
        if unknown := sorted(set(body["hyperparameters"]) - HYPERPARAMETERS) or body["config"] != CONFIG:
            return _refused(422, f"not allowed: {unknown}")
        dataset = f"{body['dataset']['namespace']}/{body['dataset']['name']}"
        if dataset not in self.datasets:
            return _refused(404, f"no dataset {dataset}")
        problem = self._dataset_problem(dataset, body["hyperparameters"])
        script = list(self.script) if problem is None else ["failed"]
        number = f"cust-{len(self.jobs)}"
        self.jobs[number] = {
            "id": number,
            "created_at": _now(),
            "updated_at": _now(),
            **body,
            "output_model": f"{body['output_model']}@{number}",
            "script": script,
            "problem": problem,
        }
        return web.json_response(self._job_body(number))

    def _dataset_problem(self, dataset: str, hyperparameters: dict[str, Any]) -> str | None:
        for part in ("training", "validation"):
            try:
                records = self.records(dataset, part)
            except (KeyError, ValueError):
                records = []
            if not records:
                return f"dataset {dataset} has no {part} records"
            allowed = FIELDS[hyperparameters["training_type"]]
            if any(set(record) not in allowed for record in records):
                return f"dataset {dataset}: the {part} records must have the fields {allowed}"
        return None

    def _job_body(self, number: str) -> dict[str, Any]:
        job = {key: value for key, value in self.jobs[number].items() if key not in ("script", "problem", "name")}
        state, problem = self.jobs[number]["script"][0], self.jobs[number]["problem"]
        status, percentage = state if isinstance(state, tuple) else (state, None)
        details = {"created_at": _now(), "updated_at": _now(), "status": status, "steps_completed": 4}
        if percentage is not None:
            details["percentage_done"] = percentage
        if status == "completed":
            details |= {"train_loss": 0.25, "val_loss": 0.5}
        if status == "failed":
            details["status_logs"] = [{"updated_at": _now(), "message": "Failed", "detail": problem or "out of memory"}]
        return {**job, "status": status, "status_details": details}

    async def _list_jobs(self, request: web.Request) -> web.Response:
        page, size = int(request.query.get("page", 1)), int(request.query["page_size"])
        namespace = request.query.get("filter[namespace]")
        newest = [number for number in reversed(self.jobs) if self.jobs[number]["namespace"] == namespace]
        data = [self._job_body(number) for number in newest[(page - 1) * size : page * size]]
        return web.json_response({"object": "list", "data": data, "pagination": {"page": page, "page_size": size}})

    async def _job(self, request: web.Request) -> web.Response:
        number = request.match_info["id"]
        if number not in self.jobs:
            return _refused(404, f"no job {number}")
        body = self._job_body(number)
        if len(script := self.jobs[number]["script"]) > 1:
            del script[0]
        return web.json_response(body)

    async def _cancel_job(self, request: web.Request) -> web.Response:
        number = request.match_info["id"]
        if number not in self.jobs:
            return _refused(404, f"no job {number}")
        self.jobs[number]["script"] = ["cancelling", "cancelled"]
        return web.json_response(self._job_body(number))

    async def _create_deployment(self, request: web.Request) -> web.Response:
        body = await request.json()
        if (name := f"{body['namespace']}/{body['name']}") in self.deployments:
            return _refused(409, f"deployment {name} already exists")
        self.deployments[name] = {**body, "url": "", "script": list(self.deployment_script)}
        return web.json_response(self._deployment_body(name))

    def _deployment_body(self, name: str) -> dict[str, Any]:
        deployment = self.deployments[name]
        details = {"status": deployment["script"][0], "description": "pulling the image"}
        return {**{k: v for k, v in deployment.items() if k != "script"}, "status_details": details}

    async def _deployment(self, request: web.Request) -> web.Response:
        name = "{namespace}/{name}".format(**request.match_info)
        if name not in self.deployments:
            return _refused(404, f"no deployment {name}")
        body = self._deployment_body(name)
        if len(script := self.deployments[name]["script"]) > 1:
            del script[0]
        elif script == ["cancelled"]:
            del self.deployments[name]
        return web.json_response(body)

    async def _delete_deployment(self, request: web.Request) -> web.Response:
        """It is there until it was looked at twice, as at the service, where this takes minutes."""
        name = "{namespace}/{name}".format(**request.match_info)
        if name not in self.deployments:
            return _refused(404, f"no deployment {name}")
        self.deployments[name]["script"] = ["cancelling", "cancelled"]
        return web.json_response({"message": "Resource deleted successfully.", "id": name})

    # Data Store

    def _datastore_routes(self) -> list[web.RouteDef]:
        repository, models = "/v1/hf/api/datasets/{namespace}/{name}", "/v1/hf/api/models/{namespace}/{name}"
        return [
            web.post("/v1/datastore/namespaces", self._create_store_namespace),
            web.get("/v1/datastore/namespaces/{id}", self._store_namespace),
            web.post("/v1/hf/api/repos/create", self._create_repository),
            web.post(f"{repository}/preupload/{{revision}}", self._preupload),
            web.post(f"{repository}/commit/{{revision}}", self._commit),
            web.get(f"{repository}/revision/{{revision}}", self._revision),
            web.post("/v1/hf/datasets/{namespace}/{name}.git/info/lfs/objects/batch", self._lfs_batch),
            # Of the Hugging Face Hub only: repositories of models
            web.post("/v1/hf/api/validate-yaml", self._validate_yaml),
            web.post(f"{models}/preupload/{{revision}}", self._preupload),
            web.post(f"{models}/commit/{{revision}}", self._commit),
            web.get(f"{models}/revision/{{revision}}", self._revision),
            web.get(f"{models}/tree/{{revision}}", self._tree),
            web.post("/v1/hf/{namespace}/{name}.git/info/lfs/objects/batch", self._lfs_batch),
            web.put("/v1/hf/lfs/{oid}", self._lfs_upload),
        ]

    async def _create_store_namespace(self, request: web.Request) -> web.Response:
        name = (await request.json())["namespace"]
        if name in self.namespaces["datastore"]:
            return _refused(409, f"namespace {name} already exists")
        self.namespaces["datastore"].add(name)
        return web.json_response({"namespace": name}, status=201)

    async def _store_namespace(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        known = name in self.namespaces["datastore"]
        return web.json_response({"namespace": name}) if known else _refused(404, f"no namespace {name}")

    async def _create_repository(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("type", "model") == "model":
            name = f"{body['organization']}/{body['name']}"
            known = name in self.repositories
            older = {True: "private", False: "public"}.get(body.get("private"))  # what clients before 1.5 send
            self.repositories.setdefault(name, Repository()).visibility = body.get("visibility", older)
            return web.json_response({"url": f"{self.datastore_host}/v1/hf/{name}"}, status=409 if known else 200)
        if body["type"] != "dataset" or body["organization"] not in self.namespaces["datastore"]:
            return _refused(403, f"no namespace {body['organization']}")
        name = f"{body['organization']}/{body['name']}"
        if name in self.repositories:
            return _refused(409, f"dataset {name} already exists")
        self.repositories[name] = Repository()
        return web.json_response({"url": f"{self.datastore_host}/v1/hf/datasets/{name}"})

    async def _validate_yaml(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["repoType"] == "model"
        return web.json_response({"warnings": [], "errors": []})

    def _repository(self, request: web.Request) -> Repository:
        return self.repositories["{namespace}/{name}".format(**request.match_info)]

    async def _preupload(self, request: web.Request) -> web.Response:
        held = self._repository(request).files
        return web.json_response(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["size"] >= self.lfs_bytes else "regular",
                        "shouldIgnore": False,
                        **({"oid": _git_oid(held[file["path"]])} if file["path"] in held else {}),
                    }
                    for file in (await request.json())["files"]
                ]
            }
        )

    async def _lfs_batch(self, request: web.Request) -> web.Response:
        objects = []
        for wanted in (await request.json())["objects"]:
            upload = {"href": f"{self.datastore_host}/v1/hf/lfs/{wanted['oid']}"}
            objects.append({**wanted, "actions": {"upload": upload}} if wanted["oid"] not in self.objects else wanted)
        return web.json_response({"transfer": "basic", "objects": objects})

    async def _lfs_upload(self, request: web.Request) -> web.Response:
        content, oid = await request.read(), request.match_info["oid"]
        if hashlib.sha256(content).hexdigest() != oid:
            return _refused(422, "the content does not match its oid")
        self.objects[oid] = content
        return web.Response()

    async def _commit(self, request: web.Request) -> web.Response:
        repository = self._repository(request)
        header, *lines = (json.loads(line) for line in (await request.read()).splitlines())
        for line in lines:
            value = line["value"]
            if line["key"] == "deletedFile":
                del repository.files[value["path"]]
                continue
            stored = line["key"] == "lfsFile"
            repository.files[value["path"]] = (
                self.objects[value["oid"]] if stored else base64.b64decode(value["content"])
            )
        repository.commits.append(header["value"]["summary"])
        oid = hashlib.sha1(repr(repository.files).encode()).hexdigest()
        # relative: huggingface-hub 0.34 cannot parse the URL of an endpoint other than its own
        url = f"datasets/{'{namespace}/{name}'.format(**request.match_info)}/commit/{oid}"
        return web.json_response({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    async def _tree(self, request: web.Request) -> web.Response:
        files = self._repository(request).files
        return web.json_response(
            [{"type": "file", "path": path, "size": len(files[path]), "oid": _git_oid(files[path])} for path in files]
        )

    async def _revision(self, request: web.Request) -> web.Response:
        oid = hashlib.sha1(repr(self._repository(request).files).encode()).hexdigest()
        return web.json_response({"id": "{namespace}/{name}".format(**request.match_info), "sha": oid, "siblings": []})


def _found(held: dict[str, dict[str, Any]], name: str) -> web.Response:
    return web.json_response(held[name]) if name in held else _refused(404, f"{name} does not exist")


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"detail": reason}, status=status)


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
