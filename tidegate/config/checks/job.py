"""Faults between the sections of a job's config. Each `*_faults` returns every fault of its kind, one a text.

GPUs exist and are named once, layouts fit their GPUs, minibatches divide into groups, times and batches fit each other.
`config_warnings` names settings that are legal but rarely intended. It needs a config without fault.
Each text gives the key, the numbers and the remedy. An empty list means that the config has no fault of that kind.
"""

from __future__ import annotations

from ipaddress import IPv4Address
from pathlib import Path

from tidegate.certs.identity import BadIdentity, Identity, Party
from tidegate.config.checks.actor_layouts import actor_layout_warnings
from tidegate.config.checks.evaluation import evaluation_warnings
from tidegate.config.checks.layouts import replicas_fault
from tidegate.config.checks.lr import lr_warnings
from tidegate.config.engines.registry import kind_of
from tidegate.config.gpu_lists import gpu_indices, list_fault
from tidegate.config.schedule import samples_per_update
from tidegate.config.sections.job import ClusterSection, JobSections
from tidegate.device_slots import num_devices
from tidegate.megatron.packing import TokenCap
from tidegate.short_lists import first_few
from tidegate.types import Role, job_id


def job_faults(config: JobSections) -> list[str]:
    faults = []
    for name, value in [("job", config.job), *(("node", node) for node in config.cluster.nodes)]:
        try:
            job_id(value)
        except ValueError as error:
            faults.append(str(error).replace("job name", f"{name} name"))
    return faults


def address_faults(config: JobSections) -> list[str]:
    """Faults of the nodes' addresses that show without a look at the machine."""
    nodes, addresses = config.cluster.nodes, config.cluster.addresses
    if not addresses:
        return []
    faults = []
    if unknown := [node for node in addresses if node not in nodes]:
        faults.append(f"cluster.addresses: {', '.join(unknown)} not in cluster.nodes ({', '.join(nodes)})")
    if missing := [node for node in nodes if node not in addresses]:
        faults.append(f"cluster.addresses: {', '.join(missing)} has none, so no other node could reach it: add it")
    known = {node: _ip_address(address) for node, address in addresses.items()}
    for node, address in known.items():
        if address is None or address.is_unspecified or address.is_multicast:
            faults.append(
                f"cluster.addresses: {node}: {addresses[node]} is no IPv4 address of a machine: give one, as 10.0.0.7"
            )
    if len({address.is_loopback for address in known.values() if address is not None}) > 1:
        faults.append("cluster.addresses: no other machine reaches an address of loopback: give all of another kind")
    return faults


def machine_faults(config: JobSections) -> list[str]:
    """Faults of the other machines that show without a call."""
    cluster = config.cluster
    if not cluster.machines:
        return []
    faults = []
    named = [node for machine in cluster.machines for node in machine.nodes]
    if unknown := [node for node in named if node not in cluster.nodes]:
        faults.append(f"cluster.machines: {', '.join(unknown)} not in cluster.nodes ({', '.join(cluster.nodes)})")
    if twice := sorted({node for node in named if named.count(node) > 1}):
        faults.append(f"cluster.machines: {', '.join(twice)} is on two of them: name it once")
    for machine in cluster.machines:
        host, _, port = machine.agent.rpartition(":")
        agent = _ip_address(host)
        here = [node for node, at in cluster.addresses.items() if (found := _ip_address(at)) and found.is_loopback]
        if here and agent is not None and not agent.is_loopback:
            faults.append(
                f"cluster.machines: {machine.name} is at {host}, and reaches no address of loopback "
                f"({', '.join(here)}): give cluster.addresses of a network"
            )
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            faults.append(f"cluster.machines: {machine.name}: agent={machine.agent} is not host:port, as 10.0.0.7:7400")
        try:
            Identity("any", Party.NODE, machine.name)
        except BadIdentity as error:
            faults.append(f"cluster.machines: {error}")
    if not cluster.addresses:
        faults.append("cluster.machines: its nodes are reached by cluster.addresses: give one for each node")
    if not cluster.machine_credentials:
        faults.append("cluster.machines: agents ask for a credential: set cluster.machine_credentials")
    if not config.runtime.gate_root:
        faults.append("cluster.machines: gates are on local disks: set runtime.gate_root to a folder of each machine")
    elif Path(config.runtime.gate_root).absolute().is_relative_to(Path(config.output_dir).absolute()):
        where = f"runtime.gate_root={config.runtime.gate_root} is in output_dir={config.output_dir}"
        faults.append(
            f"cluster.machines: {where}, which the machines share: gates are on a disk of each machine, so name "
            "another folder"
        )
    embedded = [f"servers.{kind}_url" for kind in ("nats", "redis") if not getattr(config.servers, f"{kind}_url")]
    is_beyond = any(each is not None and not each.is_loopback for each in map(_ip_address, cluster.addresses.values()))
    if embedded and is_beyond:
        faults.append(f"cluster.machines: embedded servers listen on loopback alone: set {' and '.join(embedded)}")
    return faults


def _ip_address(text: str) -> IPv4Address | None:
    try:
        return IPv4Address(text)
    except ValueError:
        return None


def model_faults(config: JobSections) -> list[str]:
    """Faults of the model's shape: incomplete, impossible, or in conflict with that of a checkpoint."""
    model = config.model
    fields = type(model).model_fields
    sizes = [name for name, field in fields.items() if name != "path" and field.default is None]
    if model.path:
        shape = [*sizes, "rope_theta", "rms_norm_eps", "tied_embeddings"]
        given = [f"model.{name}" for name in shape if getattr(model, name) != fields[name].default]
        remedy = "leave them out, or the path, for a model drawn at random"
        return [f"model.path sets the shape, and so do {', '.join(given)}: {remedy}"] if given else []
    if missing := [f"model.{name}" for name in sizes if getattr(model, name) is None]:
        return [f"{', '.join(missing)} missing: name the whole shape, or a checkpoint's folder by model.path"]
    try:
        config.model.shape(vocab_size=1)
    except ValueError as error:
        # The message begins "model num_layers=0". The config's key is "model.num_layers".
        return [str(error).replace("model ", "model.", 1)]
    return []


def placement_faults(config: JobSections) -> list[str]:
    faults: list[str] = []
    num_gpus = len(config.cluster.gpus())
    holder: dict[int, str] = {}
    for role in Role:
        key = f"cluster.component_placement.{role}"
        try:
            indices = gpu_indices(getattr(config.cluster.component_placement, role.value))
        except ValueError as error:
            faults.append(f"{key}: {error}")
            continue
        fault = list_fault(key, indices, own=str(role), num_gpus=num_gpus, holder=holder)
        if fault is None and role is not Role.ROLLOUT:
            fault = _layout_fault(config, role, len(indices))
        faults += [fault] if fault else []
        holder = dict.fromkeys(indices, str(role)) | holder
    return faults + _standby_faults(config, holder) + _rollout_standby_faults(config) + _shards_faults(config)


def _standby_faults(config: JobSections, holder: dict[int, str]) -> list[str]:
    text, num_gpus = config.actor.standby, len(config.cluster.gpus())
    try:
        indices = gpu_indices(text) if text else []
    except ValueError as error:
        return [f"actor.standby: {error}"]
    faults = [f"actor.standby names a GPU twice: {text}"] if len(set(indices)) < len(indices) else []
    fault = list_fault("actor.standby", sorted(set(indices)), own="actor", num_gpus=num_gpus, holder=holder)
    return [*faults, fault] if fault else faults


def _rollout_standby_faults(config: JobSections) -> list[str]:
    """Other components may have these GPUs: an engine only stands by for them."""
    text, num_gpus = config.rollout.standby, len(config.cluster.gpus())
    try:
        indices = gpu_indices(text) if text else []
    except ValueError as error:
        return [f"rollout.standby: {error}"]
    fault = list_fault("rollout.standby", indices, own="rollout", num_gpus=num_gpus, holder={})
    return [fault] if fault else []


def _shards_faults(config: JobSections) -> list[str]:
    num_shards = config.actor.num_logical_shards
    if num_shards is None or num_shards.bit_count() == 1:
        return []
    return [
        f"actor.num_logical_shards={num_shards} must be a power of two that every dp of the actor divides: set it to "
        "one such as 8"
    ]


def replica_faults(config: JobSections) -> list[str]:
    """Faults of the actor's replicas with its minibatches. The minibatches must divide."""
    fault = replicas_fault(
        config.layout(Role.ACTOR),
        num_samples=samples_per_update(config),
        num_shards=config.actor.num_logical_shards,
    )
    return [f"actor.layout: {fault}"] if fault else []


def _layout_fault(config: JobSections, role: Role, num_gpus: int) -> str | None:
    layout = config.layout(role)
    if layout.num_ranks == num_gpus:
        return None
    model_ranks = layout.tp * layout.pp * layout.cp
    legal = (
        f"with tp={layout.tp} pp={layout.pp} cp={layout.cp} use dp={num_gpus // model_ranks}"
        if num_gpus % model_ranks == 0 and num_gpus
        else f"tp * pp * cp = {model_ranks} does not divide {num_gpus}"
    )
    return (
        f"{role}.layout: tp * pp * dp * cp = {layout.tp} * {layout.pp} * {layout.dp} * {layout.cp} = "
        f"{layout.num_ranks} ranks, but cluster.component_placement.{role} gives {num_gpus} GPUs; {legal}"
    )


def algorithm_faults(config: JobSections) -> list[str]:
    faults = []
    algorithm = config.algorithm
    if algorithm.prompts_per_iteration % algorithm.n_minibatches:
        legal = [n for n in range(1, algorithm.prompts_per_iteration + 1) if algorithm.prompts_per_iteration % n == 0]
        faults.append(
            f"algorithm.n_minibatches={algorithm.n_minibatches} does not divide prompts_per_iteration="
            f"{algorithm.prompts_per_iteration}; legal: {', '.join(map(str, legal))}"
        )
    if algorithm.max_new_tokens >= config.model.max_seq_len:
        faults.append(
            f"algorithm.max_new_tokens={algorithm.max_new_tokens} leaves no room for a prompt in "
            f"model.max_seq_len={config.model.max_seq_len}: raise the second or lower the first"
        )
    if algorithm.max_extra_prompts and not algorithm.filter_zero_std:
        faults.append(
            f"algorithm.max_extra_prompts={algorithm.max_extra_prompts} replaces groups that filter_zero_std drops, "
            "and filter_zero_std is false: set it to true, or max_extra_prompts to 0"
        )
    if algorithm.filter_zero_std and algorithm.group_size == 1:
        faults.append(
            "algorithm.filter_zero_std=true drops every group of group_size=1, whose one reward has no spread: raise "
            "group_size to 2 or more"
        )
    if config.runtime.lead_ttl_s > config.runtime.lease_ttl_s:
        faults.append(
            f"runtime.lead_ttl_s={config.runtime.lead_ttl_s} is longer than lease_ttl_s={config.runtime.lease_ttl_s}: "
            "an instance could lead after its lease has expired; lower lead_ttl_s or raise lease_ttl_s"
        )
    return faults


def microbatch_faults(config: JobSections) -> list[str]:
    """Faults of the actor's division of minibatches into micro-batches."""
    actor, longest = config.actor, config.model.max_seq_len
    max_tokens, refuses = actor.max_tokens_per_microbatch, actor.oversize_samples == "refuse"
    faults = []
    if actor.packing == "thd" and config.cluster.device == "cpu":
        faults.append(
            "actor.packing=thd uses the attention of Transformer Engine, which needs CUDA, and cluster.device is "
            "cpu: set packing to padded"
        )
    if max_tokens is None:
        if refuses:
            faults.append(
                "actor.oversize_samples=refuse concerns samples over actor.max_tokens_per_microbatch: set that too"
            )
        if actor.packing == "thd":
            faults.append("actor.packing=thd applies only with actor.max_tokens_per_microbatch: set that too")
        return faults
    if actor.micro_batch_size != (default := type(actor).model_fields["micro_batch_size"].default):
        faults.append(
            f"actor.micro_batch_size={actor.micro_batch_size} counts sequences and max_tokens_per_microbatch="
            f"{max_tokens} tokens: set only one of them (the first has the default {default})"
        )
    if refuses and (needed := TokenCap(max_tokens).row_length(longest)) > max_tokens:
        faults.append(
            f"actor.max_tokens_per_microbatch={max_tokens} is less than the {needed} positions of a sample of "
            f"model.max_seq_len={longest}, at which oversize_samples: refuse would end the job: raise it to {needed}, "
            "or set oversize_samples to alone"
        )
    return faults


def rollout_faults(config: JobSections) -> list[str]:
    rollout, deadline_s = config.rollout, config.runtime.command_deadline_s
    return kind_of(rollout).faults(max_running_requests=rollout.max_running_requests, command_deadline_s=deadline_s)


def devices_fault(cluster: ClusterSection, num_found: int, *, machine: str = "") -> str | None:
    """The fault of a cluster with nodes on a machine that has `num_found` CUDA devices, 1 or more. None: it fits.
    `machine`: one of `cluster.machines`; empty: the one that starts the job."""
    if cluster.device == "cpu":
        return None
    nodes = [node for node in cluster.nodes if (far.name if (far := cluster.machine_of(node)) else "") == machine]
    if len(nodes) > 1:
        return (
            f"cluster.nodes: {', '.join(nodes)} are all on {machine or 'this machine'} and would each take its CUDA "
            "devices from the first on: name one node with all slots"
        )
    for node in nodes:
        num_slots = cluster.nodes[node]
        if (needed := num_devices(num_slots, slots_per_gpu=cluster.slots_per_gpu)) > num_found:
            return (
                f"cluster.nodes: {node} has {num_slots} slots, which with cluster.slots_per_gpu="
                f"{cluster.slots_per_gpu} need {needed} CUDA devices, and torch finds {num_found}: name fewer slots, "
                f"or set cluster.slots_per_gpu={-(-num_slots // num_found)} for a trial in which slots share a device"
            )
    return None


def config_warnings(config: JobSections) -> tuple[str, ...]:
    """Settings that are legal but rarely intended. The config must be without fault."""
    warnings = lr_warnings(config) + actor_layout_warnings(config) + evaluation_warnings(config)
    if config.algorithm.top_p != 1:
        warnings.append(
            f"algorithm.top_p={config.algorithm.top_p:g}: responses are sampled from the likeliest tokens only, but "
            "log-probabilities are those of the whole distribution: the update is biased; set it to 1 for GRPO as "
            "published"
        )
    if config.algorithm.importance_cap is not None and config.algorithm.old_logprobs == "engine":
        warnings.append(
            f"algorithm.importance_cap={config.algorithm.importance_cap:g} corrects nothing with old_logprobs: engine: "
            "the ratio is to the engine's own log-probabilities already; set old_logprobs to trainer, or the cap to "
            "null"
        )
    if config.actor.warm_up.steps == 0 and not (config.model.path or config.model.torch_dist):
        remedy = "" if config.task is None else "set it to 200 or so, as examples/grpo.yaml does, or "
        warnings.append(
            "actor.warm_up.steps=0: the model starts from random weights and learns only where random responses earn "
            f"some reward; {remedy}name a checkpoint by model.path"
        )
    warnings += kind_of(config.rollout).warnings(device=config.cluster.device)
    if (num_sharing := config.cluster.slots_per_gpu) > 1:
        warnings.append(
            f"cluster.slots_per_gpu={num_sharing}: up to {num_sharing} slots share a device and its memory, and ranks "
            "on one device exchange tensors through host memory: this is for trials, not for speed"
        )
    if open_at := [each for each in config.cluster.addresses.values() if not IPv4Address(each).is_loopback]:
        warnings.append(
            f"cluster.addresses: torch's stores and gloo listen on {', '.join(sorted(set(open_at)))} and ask nobody "
            "for a credential: these must be addresses of a private network"
        )
    if config.rollout.length_law is not None:
        warnings.append(
            "rollout.length_law draws the lengths of responses and ignores stop tokens, which is for benchmarks: leave "
            "it out to train"
        )
    if idle := _unused_gpus(config):
        warnings.append(
            f"cluster.component_placement leaves {len(idle)} of {len(config.cluster.gpus())} GPUs to no component: "
            f"{first_few(idle, most=8)}; give them to one, or lower cluster.nodes"
        )
    return tuple(warnings)


def _unused_gpus(config: JobSections) -> list[str]:
    """Each GPU as its index in the placement's count, and its name."""
    used = config.gpus
    return [f"{index} ({gpu})" for index, gpu in enumerate(config.cluster.gpus()) if gpu not in used]
