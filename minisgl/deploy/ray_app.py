"""Replicas of our server under Ray Serve, on one machine or many: ``pip install 'minisgl[ray]'``, and then

    serve run minisgl.deploy.ray_app:application model=default max_replicas=4

Each word is an option of `EngineConfig`, `ServerConfig` or `ReplicaConfig`. Ray starts the replicas where there is room
for them, as many as there are requests for, and replaces those that die. Its HTTP proxy (port 8000) passes a request to
an `Ingress`, which reads the prompt and lets Ray's router choose the replica that has seen most of it. No other module
knows of Ray, and this one imports it only to build the application.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig, add_options, given_options
from minisgl.server.errors import ApiError
from minisgl.server.launch import open_engine

# Ray's own. The public name of the same class cannot be imported where neither vLLM nor SGLang is installed.
PREFIX_AFFINITY = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
_MOST_UNEVEN = 8  # requests by which replicas may differ before Ray's router prefers an idle one to a known prefix

Head = tuple[int, list[tuple[bytes, bytes]]]  # status and headers


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """How many replicas there are, and what each takes.

    Args:
        min_replicas: fewest replicas; 0 gives everything back when nobody asks.
        max_replicas: most replicas.
        target_ongoing_requests: requests a replica, running and waiting, that Ray aims at when it starts or stops one.
        max_ongoing_requests: most requests that a replica is given; more wait until one is done, or another starts.
        cpus: CPU cores that Ray sets aside for a replica. GPUs are ``tensor_parallel_size``, or none on a CPU.
        request_router: ``"module:Class"`` of the request router; empty is Ray's default, the shorter of two queues.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = 32.0
    max_ongoing_requests: int = 256
    cpus: float = 1.0
    request_router: str = PREFIX_AFFINITY

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas or self.max_replicas < 1:
            raise ConfigError(
                "max_replicas: must be at least 1 and min_replicas, which is at least 0; got "
                f"{self.max_replicas} and {self.min_replicas}"
            )
        for name in ("target_ongoing_requests", "max_ongoing_requests", "cpus"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}: must be positive, got {getattr(self, name)}")

    def deployment_options(self, engine: EngineConfig, cluster_gpus: float) -> dict[str, Any]:
        """Keyword arguments of Ray's ``serve.deployment`` for replicas of this engine.

        A placement group of one bundle keeps the GPUs of a replica on one machine, where its ranks must be.
        """
        on_cpu = engine.device == "cpu" or (engine.device == "auto" and cluster_gpus == 0)
        resources = {"CPU": self.cpus} | ({} if on_cpu else {"GPU": float(engine.tensor_parallel_size)})
        options: dict[str, Any] = {
            "ray_actor_options": {f"num_{kind.lower()}s": amount for kind, amount in resources.items()},
            "placement_group_bundles": [resources],
            "placement_group_strategy": "STRICT_PACK",
            "max_ongoing_requests": self.max_ongoing_requests,
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests,
            },
        }
        if self.request_router:
            router: dict[str, Any] = {"request_router_class": self.request_router}
            if self.request_router == PREFIX_AFFINITY:
                router["request_router_kwargs"] = {"imbalanced_threshold": _MOST_UNEVEN, "do_eviction": True}
            options["request_router_config"] = router
        return options


@dataclass(frozen=True)
class Call:
    """An HTTP request on its way to a replica."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    prompt: str  # what Ray's router compares; never empty, since it divides by the length

    @property
    def scope(self) -> dict[str, Any]:
        """The request as ASGI has it."""
        return {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
        }


class EngineReplica:
    """One engine, and the application of our server before it. Make it inside the event loop that will use it."""

    def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        self._stack = ExitStack()
        self._engine = self._stack.enter_context(open_engine(engine_config, server_config))
        self._app = create_app(self._engine, server_config)
        self._engine.start()

    def check_health(self) -> None:
        """Called by Ray, which replaces the replica if this raises."""
        if self._engine.error is not None:
            raise self._engine.error

    def __del__(self) -> None:
        """Called by Ray when the replica has answered all its requests and is to end."""
        self._stack.close()

    async def answer(self, call: Call) -> AsyncIterator[Head | bytes]:
        """Yield the status and the headers of the answer, then its body, piece by piece.

        To stop early is to disconnect: the engine ends the request.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        left = asyncio.Event()
        unread = [call.body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._app(call.scope, receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif body := message.get("body"):
                    yield body
        finally:
            left.set()
            await work


class Ingress:
    """Takes requests from Ray's HTTP proxy and streams the answers of ``replicas``, Ray's handle to them."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = await request.body()
        url, headers = request.url, request.headers.raw
        call = Call(request.method, url.path, url.query.encode(), headers, body, prompt_of(body) or url.path)
        answer = aiter(self._replicas.answer.remote(call))
        try:
            status, headers = await anext(answer)
        except Exception as error:  # of any kind: a replica that died, or a queue that is full
            message = f"no replica could answer: {type(error).__name__}: {error}"
            return ApiError(503, message, code="no_replica").response()
        response = StreamingResponse(answer, status)
        response.raw_headers = headers
        return response


def prompt_of(body: bytes) -> str:
    """The text that decides what a request can share with others; empty if there is none."""
    try:
        fields = json.loads(body)
    except ValueError:
        return ""
    if not isinstance(fields, dict):
        return ""
    given = [fields[name] for name in ("tools", "messages", "prompt", "input", "text", "input_ids") if name in fields]
    return json.dumps(given)[1:-1]  # equal beginnings stay equal; the replica checks the rest


def parse_options(words: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig, ReplicaConfig]:
    """Options by name, as texts or as YAML has them. Raises `ConfigError`."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    kinds = (EngineConfig, ServerConfig, ReplicaConfig)
    for kind in kinds:
        add_options(parser, kind)
    known = {option.name for kind in kinds for option in fields(kind)}
    if unknown := sorted(set(words) - known):
        raise ConfigError(f"{unknown[0]}: unknown option; known options are {', '.join(sorted(known))}")
    try:
        arguments = parser.parse_args([f"--{name.replace('_', '-')}={_text(value)}" for name, value in words.items()])
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from error
    return (
        EngineConfig(**given_options(arguments, EngineConfig)),
        ServerConfig(**given_options(arguments, ServerConfig)),
        ReplicaConfig(**given_options(arguments, ReplicaConfig)),
    )


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def application(options: Mapping[str, Any]) -> Any:
    """Build the application, for ``serve run`` and Ray's configuration files. Raises `ConfigError`."""
    engine_config, server_config, replicas = parse_options(options)
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"ray: cannot be imported ({error}); pip install 'minisgl[ray]'") from error

    cluster_gpus = ray.cluster_resources().get("GPU", 0) if ray.is_initialized() else 0
    how = replicas.deployment_options(engine_config, cluster_gpus)
    engines = serve.deployment(**how)(EngineReplica).bind(engine_config, server_config)
    return serve.deployment(max_ongoing_requests=replicas.max_ongoing_requests * replicas.max_replicas)(Ingress).bind(
        engines
    )
