"""What other programs call the keys of a run file, and which key means the same here.

It is asked only about names that are no keys. Answers are hints for people; nothing is renamed for them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from bireme.train.run_file.text import known_keys

LAYERS = "Bireme gives each device whole layers, with their gradients and optimizer state:"

_KNOWN = f"""
# [model]
model.source: model_name_or_path model_name model_path model_id name_or_path pretrained model.name model.path
    pretrained_model_name_or_path base_model
    | A transformers model is hf:FOLDER.
model.dtype: bf16 fp16 fp32 precision mixed_precision amp autocast torch_dtype half use_bf16
    | Mixed precision is "bfloat16".
model.compile: torch_compile use_compile compile_model
model.fused_loss: use_liger_kernel liger_kernel use_liger fused_linear_cross_entropy fused_cross_entropy
    chunked_cross_entropy
model.seed data.seed training.seed: init_seed random_seed manual_seed
# [data]
data.length: seq_len seqlen seq_length sequence_length sequence_len max_seq_len max_seq_length max_length
    block_size context_length context_len context_size ctx_len n_ctx context
data.source: dataset datasets dataset_name dataset_path data_path data_dir train_file train_files train_data
    train_path train_dataset training_data data.path data.name data.file
data.evaluation_source: eval_dataset eval_data eval_file eval_source val_data val_file val_dataset
    validation_data validation_file validation_source test_data test_file
data.evaluation_fraction: eval_fraction eval_split val_fraction val_split val_size validation_fraction
    validation_split validation_split_percentage test_size test_split
    | It is a share of the data, from 0 to 1.
data.tokenizer: tokenizer_name tokenizer_path tokenizer_name_or_path
data.text_column: text_field text_key dataset_text_field
data.num_workers: dataloader_num_workers dataloader_workers num_loader_workers loader_workers
data.prefetch: prefetch_factor dataloader_prefetch_factor
data.seed: data_seed shuffle_seed
# [sync]
sync.connect_every: ssp_bound sync_bound connectivity_period
sync.diloco_every: sync_every local_steps inner_steps num_inner_steps diloco_steps h_steps
sync.diloco_rate: outer_lr outer_learning_rate
sync.diloco_fragments: num_fragments fragments
sync.diloco_overlap: fragment_sync_delay overlap_steps
# [training]
training.learning_rate: lr max_lr peak_lr base_lr learning_rate_max
training.final_fraction: min_lr lr_min min_learning_rate final_lr eta_min
    | It is a share of learning_rate.
training.batch_size: global_batch_size train_batch_size total_batch_size batch bs gbs
    | It counts the samples of a step over all devices.
training.steps: max_steps num_steps n_steps train_steps num_train_steps total_steps max_iters num_iters
    train_iters iterations num_iterations max_train_steps
training.epochs: epoch num_epochs n_epochs num_train_epochs max_epochs
training.warmup_steps training.warmup_fraction: warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup
    lr_warmup_steps lr_warmup_iters
training.schedule: scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style learning_rate_schedule
training.optimizer: optim optimizer_name optimizer_type
training.weight_decay: wd
training.betas: beta1 beta2 adam_beta1 adam_beta2 adam_betas
    | It has both: [0.9, 0.95].
training.clip_norm: grad_clip clip clip_grad clip_grad_norm clip_gradient max_grad_norm max_norm
    grad_norm_clip gradient_clip gradient_clipping gradient_clip_val
training.evaluate_every: eval evaluate evaluation eval_steps eval_every eval_interval eval_freq
    evaluation_steps evaluation_interval validation_interval val_interval val_check_interval
training.evaluation_batches: eval_iters eval_batches max_eval_batches limit_val_batches limit_eval_batches
training.time_limit_s: time_limit max_time max_train_time max_duration
# [plan]
plan.width: dp dp_size dp_degree ddp data_parallel data_parallel_size data_parallel_degree replicas
    num_replicas
    | It is the number of replicas of the pipeline.
plan.depth: pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree
    pipeline_model_parallel_size stages num_stages pipeline_stages
    | It is the number of devices that a pipeline has.
: tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size
    cp context_parallel sp sequence_parallel ep expert_parallel
    | There is none: {LAYERS} plan.depth is how many devices share a model.
: fsdp fsdp_config fully_sharded_data_parallel zero zero_stage zero_optimization deepspeed deepspeed_config
    sharding_strategy
    | There is none: {LAYERS} plan.depth is how many devices share a model, plan.width how many replicas there
    are, and memory.shard = "optimizer" or "weights" what the replicas share.
plan.micro_batch: per_device_batch_size per_device_train_batch_size per_gpu_batch_size micro_batch_size
    microbatch_size mbs train_micro_batch_size_per_gpu
    | training.batch_size counts the samples of a step over all devices.
plan.microbatches: gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps
    grad_accumulation accumulate_grad_batches accumulation_steps num_microbatches num_micro_batches
    micro_batches n_microbatches chunks
    | It is how many parts a step's batch goes through the pipeline in.
plan.recompute: gradient_checkpointing activation_checkpointing checkpoint_activations activation_recompute
    activation_recomputation recompute_activations recompute_granularity
    | It is "never", "where-needed", "layers" or "always".
plan.schedule: pipeline_schedule pipeline_parallel_schedule pp_schedule
# [cluster]
cluster.workers: gpus num_gpus n_gpus ngpus devices num_devices nproc nproc_per_node num_processes world_size
    cluster.num_workers training.workers
    | It is the number of processes on this machine, one for each GPU.
cluster.source: nodes num_nodes nnodes num_machines hosts hostfile
    | It names a cluster file; or start bireme train by torchrun on each machine.
cluster.device: accelerator device_type
cluster.backend: dist_backend distributed_backend ddp_backend
cluster.timeout_s: timeout ddp_timeout nccl_timeout dist_timeout
cluster.threads_per_worker: num_threads omp_num_threads threads
# [checkpoint]
checkpoint.every_steps: save_steps save_every save_every_steps save_interval checkpoint_every
    checkpoint_interval checkpoint_steps checkpointing_steps ckpt_interval
checkpoint.keep: save_total_limit keep_last keep_checkpoints max_checkpoints max_to_keep
: resume resume_from resume_from_checkpoint init_from load_checkpoint
    | `bireme resume RUN` continues a run.
# [log]
log.folder: output_dir out_dir output_folder save_dir run_dir runs_dir logdir log_dir logging_dir
    default_root_dir
log.name: run_name exp_name experiment experiment_name job_name
log.every_steps: logging_steps log_interval log_every log_every_n_steps log_steps log_freq print_every
log.tensorboard: report_to tensorboard_dir use_tensorboard
"""
"""Keys, the names that mean the same, and after a | what else there is to know. Names with a table are for it
only.
"""


@dataclass(frozen=True, slots=True)
class Synonyms:
    """Names that mean the same as some keys, or as none, and a sentence on them, empty if there is none."""

    names: tuple[str, ...]
    keys: tuple[str, ...]
    more: str


def _read(entry: str) -> Synonyms:
    words, _, more = entry.partition("|")
    keys, _, names = words.partition(":")
    return Synonyms(tuple(names.split()), tuple(keys.split()), " ".join(more.split()))


SYNONYMS = tuple(_read(entry) for entry in re.split(r"\n(?=\S)", _KNOWN.strip()) if entry[0] != "#")


RENAMED = {
    "links.borders": "links.boundaries",
    "links.boundaries.border": "boundary",
    "sync.outer_every": "sync.diloco_every",
    "sync.outer_rate": "sync.diloco_rate",
    "sync.outer_momentum": "sync.diloco_momentum",
    "sync.outer_fragments": "sync.diloco_fragments",
    "sync.outer_overlap": "sync.diloco_overlap",
}
"""Keys of earlier versions, and what they are called now."""


def advice(path: Sequence[str]) -> str:
    """A hint for a key that is not known: by its name elsewhere, or in another table; empty if there is none.

    `path` is the table, if it is in one, and the name.
    """
    words = [part.lower().replace("-", "_") for part in path if not part.isdigit()]
    if (new := RENAMED.get(".".join(words))) is not None:
        return f"It is called {new!r} now."
    for name in (".".join(words), words[-1], words[0]):
        if name in _by_name():
            known = _by_name()[name]
            return " ".join(filter(None, (_asked(known.keys), known.more)))
    return _asked([known for known in known_keys() if known.rpartition(".")[2] == words[-1]])


def _asked(keys: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, keys))}?" if keys else ""


@cache
def _by_name() -> dict[str, Synonyms]:
    return {name: one for one in SYNONYMS for name in one.names}
