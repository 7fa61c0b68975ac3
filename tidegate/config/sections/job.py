"""The config's sections on a job's place and its computation, and `JobSections`: all sections as one value.

`JobSections` has the fields and what follows from them alone, so that the checks can name its type. `JobConfig` is the
checked version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidegate.config.base import (
    OUTPUT_DIR,
    ConfigPath,
    Count,
    GpuList,
    Nodes,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
)
from tidegate.config.base import Section as _Section
from tidegate.config.engines.registry import RolloutSection
from tidegate.config.gpu_lists import gpu_indices
from tidegate.config.sections.costs import AssumptionsSection
from tidegate.config.sections.data import DataSection, RewardSection
from tidegate.config.sections.evaluation import EvaluationSection
from tidegate.config.sections.lr import LrScheduleSection
from tidegate.config.sections.pace import PaceSection
from tidegate.config.sections.record import SamplesSection, TrackingSection
from tidegate.config.sections.scheduler import SchedulerSection
from tidegate.device_slots import DeviceKind
from tidegate.megatron.packing import PAD_MULTIPLE
from tidegate.model_config import ModelConfig
from tidegate.types import LOOPBACK, GpuId, Layout, MinibatchOrder, NodeId, Precision, Recompute, Role, gpu_id


class LayoutSection(_Section):
    """The sizes of the axes. The component has tp * pp * dp * cp GPUs."""

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive = 1
    cp: Positive = 1
    ep: Positive = 1
    vpp: Positive = 1

    @model_validator(mode="after")
    def _makes_a_layout(self) -> LayoutSection:
        self.layout()
        return self

    def layout(self) -> Layout:
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, ep=self.ep, vpp=self.vpp)


class AllowedLayoutSection(_Section):
    """Layouts that a policy may choose for the actor: the axes of a data-parallel copy, and the number of copies."""

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive | None = None
    """None: any number of copies that fits the minibatch and the GPUs."""
    cp: Positive = 1
    ep: Positive = 1
    vpp: Positive = 1

    @model_validator(mode="after")
    def _makes_a_layout(self) -> AllowedLayoutSection:
        self.layout()
        return self

    def layout(self, dp: int | None = None) -> Layout:
        """The layout with `dp` copies; None: with those of the section, or one."""
        return Layout(tp=self.tp, pp=self.pp, dp=dp or self.dp or 1, cp=self.cp, ep=self.ep, vpp=self.vpp)


class PlacementSection(_Section):
    """The GPUs of each component, counted over the nodes in order: `0-3`, `0,2,5`, `4`."""

    actor: GpuList
    rollout: GpuList
    inference: GpuList


class MachineSection(_Section):
    """Another machine. `name`: that in its agent's credential. `agent`: host and port of its `tidegate agent`. `nodes`:
    those of the job that it runs."""

    name: str
    agent: str
    nodes: tuple[str, ...]


class ClusterSection(_Section):
    """Nodes in order, with their numbers of GPU slots. On `cpu` a slot is a process."""

    nodes: Nodes
    device: DeviceKind = "cpu"
    slots_per_gpu: Positive = 1
    """The most slots that share one device. The first slots of a node share its device 0."""
    addresses: dict[str, str] = {}  # noqa: RUF012 # pydantic copies it for each section
    """The IPv4 address of each node, on which its processes listen and others reach them. Empty: loopback."""
    machines: tuple[MachineSection, ...] = ()
    """Other machines. A node that none of them names runs where the job is started."""
    machine_credentials: ConfigPath = ""
    """The folder of an operator's credential, which the agents ask for, relative to the config's folder."""
    component_placement: PlacementSection
    pace: PaceSection | None = None
    """The speed of a cited GPU for each slot. None: a slot is as fast as its CPU."""

    def address_of(self, node: NodeId) -> str:
        return self.addresses.get(node, LOOPBACK)

    def machine_of(self, node: str) -> MachineSection | None:
        """The other machine that has the node. None: it runs where the job is started."""
        return next((machine for machine in self.machines if node in machine.nodes), None)

    def far_nodes(self) -> tuple[NodeId, ...]:
        """Those of other machines."""
        return tuple(NodeId(node) for machine in self.machines for node in machine.nodes)

    def gpus(self) -> tuple[GpuId, ...]:
        return tuple(gpu_id(NodeId(node), index) for node, count in self.nodes.items() for index in range(count))


class ModelSection(_Section):
    """A checkpoint, or the shape of a Llama with random weights and the vocabulary of the tokenizer."""

    num_layers: Positive | None = None
    hidden_size: Positive | None = None
    ffn_hidden_size: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    head_dim: Positive | None = None
    max_seq_len: Positive
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-5
    tied_embeddings: bool = True
    path: ConfigPath = ""
    """The folder of a Hugging Face checkpoint, relative to the config's folder. The checkpoint then sets the shape."""
    torch_dist: ConfigPath = ""
    """The folder of one iteration that Megatron saved, relative to the config's folder: weights of the same shape."""
    tokenizer: ConfigPath = ""
    """The path of a `tokenizer.json`, relative to the config's folder. Empty: the checkpoint's tokenizer, or one that
    is made from the task's words."""

    def shape(self, vocab_size: int) -> ModelConfig:
        """The shape that these keys set, for a model without a checkpoint."""
        fields = self.model_dump(exclude={"path", "torch_dist", "tokenizer"})
        return ModelConfig(vocab_size=vocab_size, **fields)


class TaskSection(_Section):
    """A built-in task to train on. For prompts of the user's own, `data` and `rewards` replace it."""

    name: str


class AlgorithmSection(_Section):
    """GRPO. One iteration samples `prompts_per_iteration * group_size` responses and makes `n_minibatches` updates."""

    iterations: Positive
    prompts_per_iteration: Positive
    group_size: Positive
    n_minibatches: Positive = 1
    minibatch_order: MinibatchOrder = MinibatchOrder.FIXED
    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_new_tokens: Positive
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2
    kl_coefficient: NonNegativeFloat = 0.0
    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    normalize_std: bool = True
    mask_truncated: bool = False
    filter_zero_std: bool = False
    max_extra_prompts: Count = 0
    """The extra prompts that an iteration may take to replace the groups that `filter_zero_std` drops."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    importance_cap: PositiveFloat | None = None
    """The upper bound of the trainer/engine importance weights. None: no correction."""


class WarmUpSection(_Section):
    """Supervised training on the task's demonstrations before iteration 0. With 0 steps there is none."""

    steps: Count = 0
    batch_size: Positive = 64
    learning_rate: PositiveFloat = 1e-3


class ActorSection(_Section):
    """Training."""

    layout: LayoutSection = LayoutSection()
    layouts: tuple[AllowedLayoutSection, ...] = ()
    """What a policy may choose besides `layout` with any number of copies."""
    standby: GpuList = ""
    """GPUs that the actor may get while it works, besides those of its placement, in the notation of the placement."""
    standby_memory_mib: Positive = 2048
    """The memory limit of a process that stands by on a slot for the actor. A process that takes more is ended, and
    its slot starts cold."""
    layouts_ahead_mib: Count = 1024
    """The memory of one process for layouts that are built before a policy asks for them. 0: none is built ahead."""
    precision: Precision = Precision.FP32
    """The precision of the weights in training, in snapshots and in the inference, so that the log-probabilities of
    inference and actor agree."""
    recompute: Recompute = Recompute.NONE
    num_logical_shards: Positive | None = None
    """A power of two that every dp divides. Updates then have the same bits for every dp and pp."""
    copies: Literal["nowhere", "node", "peer"] = "nowhere"
    """Where the last two states of each rank are kept beside the current one. With `peer`, also on another rank."""
    learning_rate: PositiveFloat
    lr_warm_up_samples: Count = 0
    lr_schedule: LrScheduleSection = LrScheduleSection()
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_epsilon: PositiveFloat = 1e-8
    clip_grad: PositiveFloat = 1.0
    micro_batch_size: Positive = 16
    max_tokens_per_microbatch: Annotated[int, Field(ge=PAD_MULTIPLE)] | None = None
    """The positions of a micro-batch, padding included. It replaces `micro_batch_size`."""
    oversize_samples: Literal["alone", "refuse"] = "alone"
    """A sample longer than that has a micro-batch of its own (`alone`), or the job does not start (`refuse`)."""
    packing: Literal["padded", "thd"] = "padded"
    """The form of a micro-batch under that cap: padded rows, or sequences one after the other."""
    streams_minibatches: bool = True
    """Whether a minibatch trains while its groups arrive. If not, it waits for all of them."""
    max_skipped_updates: Count = 3
    """The most consecutive updates that are skipped for a non-finite gradient. One more ends the job."""
    warm_up: WarmUpSection = WarmUpSection()

    @property
    def carries_gradients(self) -> bool:
        """Whether an open minibatch goes on in the new layout after a reshard. In reproducible mode it begins again:
        there the bits depend on sums by shard."""
        return self.streams_minibatches and self.num_logical_shards is None


class InferenceSection(_Section):
    """Log-probabilities."""

    layout: LayoutSection = LayoutSection()
    max_tokens_per_microbatch: Positive = 4096
    standby_memory_mib: Positive = 2048
    """The memory limit of a process that stands by on a slot for the inference. A process that takes more is ended,
    and its slot starts cold."""


class CheckpointSection(_Section):
    """A checkpoint is saved every `every` iterations, and the newest `keep` are kept."""

    every: Positive = 1
    keep: Positive = 2
    export: bool = False
    """Whether to save the final weights as a Hugging Face checkpoint in the job's folder."""


class RuntimeSection(_Section):
    """Times and bounds of the services."""

    lease_ttl_s: PositiveFloat = 20.0
    lead_ttl_s: PositiveFloat = 10.0
    ack_wait_s: PositiveFloat = 30.0
    command_deadline_s: PositiveFloat = 120.0
    work_timeout_s: PositiveFloat = 3600.0
    """The limit of one call that warms up, trains, generates or scores. A worker's death is noticed at once,
    whatever this limit is."""
    collective_timeout_s: PositiveFloat = 60.0
    max_deliveries: Positive = 8
    max_actor_restarts: Count = 3
    host_memory_root: str = "/dev/shm"
    """The folder, in memory, of the snapshots of weights. The job makes a folder of its own in it."""
    gate_root: ConfigPath = ""
    """The folder of the gates of this machine's nodes, on a local disk, relative to the config's folder. Jobs that
    share GPUs name the same one. Empty: the job's own folder has them."""
    fork_server: ConfigPath = ""
    """The socket of a fork server that this machine keeps for all its jobs on CPUs. Empty: the job starts its own.
    Nodes on other machines have their own in any case."""
    adopts_store: bool = True
    """Whether the job's scheduler opens a Redis that has restarted, by the gates of the job's nodes. False: a cluster's
    scheduler does, which asks the gates of all jobs."""
    events_max_bytes: Annotated[int, Field(ge=2**20)] = 256 * 2**20
    """The size of the event stream, which NATS reserves on its disk. The stream keeps the newest 2,048 messages, and
    older events until the job's folder has them. Of figures it keeps the last of each source, kind and iteration. An
    event has some 200 bytes, the last pictures of a large iteration some 60 kB. A full stream refuses new events. So
    the launcher stops the run before (`launcher.follow`)."""
    samples_max_bytes: Positive = 2 * 2**30
    """The size of all samples since the last checkpoint, generated and scored."""
    dead_max_bytes: Positive = 256 * 2**20


class ServersSection(_Section):
    """URLs of real servers. Empty: the job starts embedded ones on free loopback ports."""

    nats_url: str = ""
    """One or several, with commas between: the servers of one NATS cluster."""
    redis_url: str = ""
    """Of one server, or of Sentinels that name the primary: redis+sentinel://host:port,host:port/NAME."""
    nats_replicas: Annotated[int, Field(ge=1, le=5)] | None = None
    """The copies of each stream. None: three where the cluster has three servers, else one."""
    redis_replicas: Count | None = None
    """The replicas that have a write before it counts. None: one where Sentinels are asked, else none."""
    nats_credentials: str = ""
    """The folder in which `scheduler/` and `job/` are credentials, as `tidegate certs issue` makes them. The job's
    processes show them to the server. Empty: what the URL says. An embedded server takes the job's own."""
    redis_credentials: str = ""
    """The same for Redis, whose users have the passwords in these folders."""
    credentials_travel: bool = False
    """Whether the `job/` of both goes to other machines with the job. If not, they have it at the same path. A
    credential that travels is read at the start alone."""

    def nats_credential(self, party: str) -> Path | None:
        """The folder of a party's credential."""
        return Path(self.nats_credentials) / party if self.nats_credentials else None

    def redis_credential(self, party: str) -> Path | None:
        """The folder of a party's credential."""
        return Path(self.redis_credentials) / party if self.redis_credentials else None


class JobSections(_Section):
    job: str
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    output_dir: str = OUTPUT_DIR
    cluster: ClusterSection
    model: ModelSection
    task: TaskSection | None = None
    data: DataSection | None = None
    rewards: tuple[RewardSection, ...] = ()
    algorithm: AlgorithmSection
    actor: ActorSection
    rollout: RolloutSection = RolloutSection()
    inference: InferenceSection = InferenceSection()
    scheduler: SchedulerSection = SchedulerSection()
    assumptions: AssumptionsSection = AssumptionsSection()
    evaluation: EvaluationSection | None = None
    checkpoint: CheckpointSection = CheckpointSection()
    samples: SamplesSection = SamplesSection()
    tracking: TrackingSection = TrackingSection()
    runtime: RuntimeSection = RuntimeSection()
    servers: ServersSection = ServersSection()

    def placement(self, role: Role) -> tuple[GpuId, ...]:
        """The role's GPUs in rank order."""
        text = getattr(self.cluster.component_placement, role.value)
        return tuple(self.cluster.gpus()[index] for index in gpu_indices(text))

    def standby(self) -> tuple[GpuId, ...]:
        """GPUs that the actor may get besides those of its placement."""
        text = self.actor.standby
        return tuple(self.cluster.gpus()[index] for index in gpu_indices(text)) if text else ()

    def slots(self, role: Role) -> tuple[GpuId, ...]:
        """The GPUs that a policy may give to the component, in the cluster's order."""
        roles = list(Role) if self.scheduler.moves_gpus else [role]
        may_get = {gpu for each in roles for gpu in self.placement(each)}
        if Role.ACTOR in roles:
            may_get |= set(self.standby())
        if role is Role.ROLLOUT and self.rollout.standby:
            may_get |= {self.cluster.gpus()[index] for index in gpu_indices(self.rollout.standby)}
        return tuple(gpu for gpu in self.cluster.gpus() if gpu in may_get)

    @property
    def scores_ahead(self) -> bool:
        """Whether the inference scores responses ahead of their groups. Not in reproducible mode: which responses share
        a micro-batch then depends on when they ended, and with it the bits."""
        return self.actor.num_logical_shards is None

    @property
    def gpus(self) -> tuple[GpuId, ...]:
        """The GPUs of all components, in the cluster's order. By hand each component may get each of them."""
        used = {gpu for role in Role for gpu in self.slots(role)}
        return tuple(gpu for gpu in self.cluster.gpus() if gpu in used)

    def layout(self, role: Role) -> Layout:
        """The role's layout. The rollout has one engine a GPU."""
        match role:
            case Role.ACTOR:
                return self.actor.layout.layout()
            case Role.INFERENCE:
                return self.inference.layout.layout()
            case Role.ROLLOUT:
                return Layout(dp=len(self.placement(role)))
