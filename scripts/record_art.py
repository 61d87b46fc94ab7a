"""Records what official ART clients send, for test_art_protocol.py, between them and a backend of ours.

    python scripts/record_art.py [RELEASE ...]      # those of `make test WITH=art`, in their environments

Writes tests/data/art/RELEASE.json: a list of requests in their order with `method`, `path`, `headers`, `body`, and what
came back as `status` and `answer`.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

import aiohttp
from aiohttp import web

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))
KEPT_HEADERS = ("authorization", "content-type", "idempotency-key", "user-agent")
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TQDM_DISABLE": "1"}


async def record(release: str) -> None:
    from tiny_models import save_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder) / "llama", max_position_embeddings=1024)
        command = [Path(sys.executable).with_name("insitu"), "backend", "--model", model, "--port", "0"]
        backend = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            address = (await backend.stdout.readline()).decode().split()[-1]
            requests = await between(address, release, folder)
        finally:
            backend.terminate()
            await backend.wait()
    target = ROOT / f"tests/data/art/{release}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text("[\n" + ",\n".join(json.dumps(each) for each in requests) + "\n]\n")
    print(f"{target}: {len(requests)} requests, {target.stat().st_size} bytes")


async def between(address: str, release: str, folder: str) -> list[dict]:
    """Runs the client against a proxy before the backend; what went through it."""
    seen: list[dict] = []

    async def forward(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items() if name.lower() in KEPT_HEADERS}
        async with session.request(
            request.method, request.path_qs, data=body or None, headers=request.headers
        ) as reply:
            answer = await reply.read()
            sent = {"method": request.method, "path": request.path_qs, "headers": headers}
            came = {"status": reply.status, "answer": answer.decode()}
            seen.append(sent | {"body": json.loads(body) if body else None} | came)
            return web.Response(status=reply.status, body=answer, content_type=reply.content_type)

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    async with aiohttp.ClientSession(address) as session:
        client = [ROOT / f".environments/art/{release}/bin/python", ROOT / "scripts/art_session.py"]
        process = await asyncio.create_subprocess_exec(
            *client, release, f"http://127.0.0.1:{port}", env=os.environ | QUIET, cwd=folder
        )
        if await process.wait():
            raise SystemExit(f"the client of {release} failed")
    await runner.cleanup()
    return seen


for release in sys.argv[1:] or ("0.5.4", "0.5.18"):
    asyncio.run(record(release))
