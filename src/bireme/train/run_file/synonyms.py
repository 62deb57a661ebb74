"""What other programs call the keys of a run file, and which key means the same here.

It is asked only about names that are no keys. Answers are hints for people; nothing is renamed for them.
"""

from collections.abc import Iterator, Sequence
from functools import cache

from bireme.train.run_file.text import tables_of_keys

LAYERS = "Bireme gives each device whole layers, with their gradients and optimizer state:"

SYNONYMS: tuple[tuple[str, str, str], ...] = (
    # [model]
    (
        "model_name_or_path model_name model_path model_id name_or_path pretrained model.name model.path "
        "pretrained_model_name_or_path base_model",
        "model.source",
        "A transformers model is hf:FOLDER.",
    ),
    (
        "bf16 fp16 fp32 precision mixed_precision amp autocast torch_dtype half use_bf16",
        "model.dtype",
        'Mixed precision is "bfloat16".',
    ),
    ("torch_compile use_compile compile_model", "model.compile", ""),
    ("init_seed random_seed manual_seed", "model.seed data.seed training.seed", ""),
    # [data]
    (
        "seq_len seqlen seq_length sequence_length sequence_len max_seq_len max_seq_length max_length "
        "block_size context_length context_len context_size ctx_len n_ctx context",
        "data.length",
        "",
    ),
    (
        "dataset datasets dataset_name dataset_path data_path data_dir train_file train_files train_data "
        "train_path train_dataset training_data data.path data.name data.file",
        "data.source",
        "",
    ),
    (
        "eval_dataset eval_data eval_file eval_source val_data val_file val_dataset validation_data "
        "validation_file validation_source test_data test_file",
        "data.evaluation_source",
        "",
    ),
    (
        "eval_fraction eval_split val_fraction val_split val_size validation_fraction validation_split "
        "validation_split_percentage test_size test_split",
        "data.evaluation_fraction",
        "It is a share of the data, from 0 to 1.",
    ),
    ("tokenizer_name tokenizer_path tokenizer_name_or_path", "data.tokenizer", ""),
    ("text_field text_key dataset_text_field", "data.text_column", ""),
    ("dataloader_num_workers dataloader_workers num_loader_workers loader_workers", "data.num_workers", ""),
    ("prefetch_factor dataloader_prefetch_factor", "data.prefetch", ""),
    ("data_seed shuffle_seed", "data.seed", ""),
    # [sync]
    ("ssp_bound sync_bound connectivity_period", "sync.connect_every", ""),
    ("sync_every local_steps inner_steps num_inner_steps diloco_steps h_steps", "sync.diloco_every", ""),
    ("outer_lr outer_learning_rate", "sync.diloco_rate", ""),
    ("num_fragments fragments", "sync.diloco_fragments", ""),
    ("fragment_sync_delay overlap_steps", "sync.diloco_overlap", ""),
    # [training]
    ("lr max_lr peak_lr base_lr learning_rate_max", "training.learning_rate", ""),
    (
        "min_lr lr_min min_learning_rate final_lr eta_min",
        "training.final_fraction",
        "It is a share of learning_rate.",
    ),
    (
        "global_batch_size train_batch_size total_batch_size batch bs gbs",
        "training.batch_size",
        "It counts the samples of a step over all devices.",
    ),
    (
        "max_steps num_steps n_steps train_steps num_train_steps total_steps max_iters num_iters train_iters "
        "iterations num_iterations max_train_steps",
        "training.steps",
        "",
    ),
    (
        "epochs epoch num_epochs n_epochs num_train_epochs max_epochs",
        "training.steps",
        "An epoch is as many steps as the data has batches.",
    ),
    (
        "warmup warmup_iters warmup_ratio num_warmup_steps lr_warmup lr_warmup_steps lr_warmup_iters",
        "training.warmup_steps training.warmup_fraction",
        "",
    ),
    (
        "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style learning_rate_schedule",
        "training.schedule",
        "",
    ),
    ("optim optimizer_name optimizer_type", "training.optimizer", ""),
    ("wd", "training.weight_decay", ""),
    ("beta1 beta2 adam_beta1 adam_beta2 adam_betas", "training.betas", "It has both: [0.9, 0.95]."),
    (
        "grad_clip clip clip_grad clip_grad_norm clip_gradient max_grad_norm max_norm grad_norm_clip "
        "gradient_clip gradient_clipping gradient_clip_val",
        "training.clip_norm",
        "",
    ),
    (
        "eval evaluate evaluation eval_steps eval_every eval_interval eval_freq evaluation_steps "
        "evaluation_interval validation_interval val_interval val_check_interval",
        "training.evaluate_every",
        "",
    ),
    (
        "eval_iters eval_batches max_eval_batches limit_val_batches limit_eval_batches",
        "training.evaluation_batches",
        "",
    ),
    ("time_limit max_time max_train_time max_duration", "training.time_limit_s", ""),
    # [plan]
    (
        "dp dp_size dp_degree ddp data_parallel data_parallel_size data_parallel_degree replicas "
        "num_replicas",
        "plan.width",
        "It is the number of replicas of the pipeline.",
    ),
    (
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size stages num_stages pipeline_stages",
        "plan.depth",
        "It is the number of devices that a pipeline has.",
    ),
    (
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree "
        "tensor_model_parallel_size cp context_parallel sp sequence_parallel ep expert_parallel",
        "",
        f"There is none: {LAYERS} plan.depth is how many devices share a model.",
    ),
    (
        "fsdp fsdp_config fully_sharded_data_parallel zero zero_stage zero_optimization deepspeed "
        "deepspeed_config sharding_strategy",
        "",
        f"There is none: {LAYERS} plan.depth is how many devices share a model, plan.width how many "
        'replicas there are, and memory.shard = "optimizer" or "weights" what the replicas share.',
    ),
    (
        "per_device_batch_size per_device_train_batch_size per_gpu_batch_size micro_batch_size "
        "microbatch_size mbs train_micro_batch_size_per_gpu",
        "plan.micro_batch",
        "training.batch_size counts the samples of a step over all devices.",
    ),
    (
        "gradient_accumulation gradient_accumulation_steps grad_accum grad_accum_steps grad_accumulation "
        "accumulate_grad_batches accumulation_steps num_microbatches num_micro_batches micro_batches "
        "n_microbatches chunks",
        "plan.microbatches",
        "It is how many parts a step's batch goes through the pipeline in.",
    ),
    (
        "gradient_checkpointing activation_checkpointing checkpoint_activations activation_recompute "
        "activation_recomputation recompute_activations recompute_granularity",
        "plan.recompute",
        'It is "never", "where-needed" or "always".',
    ),
    ("pipeline_schedule pipeline_parallel_schedule pp_schedule", "plan.schedule", ""),
    # [cluster]
    (
        "gpus num_gpus n_gpus ngpus devices num_devices nproc nproc_per_node num_processes world_size "
        "cluster.num_workers training.workers",
        "cluster.workers",
        "It is the number of processes on this machine, one for each GPU.",
    ),
    (
        "nodes num_nodes nnodes num_machines hosts hostfile",
        "cluster.source",
        "It names a cluster file; or start bireme train by torchrun on each machine.",
    ),
    ("accelerator device_type", "cluster.device", ""),
    ("dist_backend distributed_backend ddp_backend", "cluster.backend", ""),
    ("timeout ddp_timeout nccl_timeout dist_timeout", "cluster.timeout_s", ""),
    ("num_threads omp_num_threads threads", "cluster.threads_per_worker", ""),
    # [checkpoint]
    (
        "save_steps save_every save_every_steps save_interval checkpoint_every checkpoint_interval "
        "checkpoint_steps checkpointing_steps ckpt_interval",
        "checkpoint.every_steps",
        "",
    ),
    ("save_total_limit keep_last keep_checkpoints max_checkpoints max_to_keep", "checkpoint.keep", ""),
    (
        "resume resume_from resume_from_checkpoint init_from load_checkpoint",
        "",
        "`bireme resume RUN` continues a run.",
    ),
    # [log]
    (
        "output_dir out_dir output_folder save_dir run_dir runs_dir logdir log_dir logging_dir "
        "default_root_dir",
        "log.folder",
        "",
    ),
    ("run_name exp_name experiment experiment_name job_name", "log.name", ""),
    (
        "logging_steps log_interval log_every log_every_n_steps log_steps log_freq print_every",
        "log.every_steps",
        "",
    ),
    ("report_to tensorboard_dir use_tensorboard", "log.tensorboard", ""),
)
"""Names, the keys that mean the same, and what else there is to know. Names with a table are for it only."""


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
            keys, more = _by_name()[name]
            return " ".join(filter(None, (_asked(keys), more)))
    return _asked([known for known in _keys() if known.rpartition(".")[2] == words[-1]])


def _asked(keys: Sequence[str]) -> str:
    return f"Did you mean {' or '.join(map(repr, keys))}?" if keys else ""


@cache
def _keys() -> tuple[str, ...]:
    return tuple(f"{table.name}.{key.name}" for table in tables_of_keys() for key in table.keys)


@cache
def _by_name() -> dict[str, tuple[list[str], str]]:
    return dict(_entries())


def _entries() -> Iterator[tuple[str, tuple[list[str], str]]]:
    for names, keys, more in SYNONYMS:
        for name in names.split():
            yield name, (keys.split(), more)
