"""Configuration texts as the documents of other tools print them, and what their tables say."""

from typing import Any

LOCAL: dict[str, str] = {
    "a whole run": """
model:
  model_path: Qwen/Qwen3-8B # HF Hub ID or local path
  attn_implementation: flash_attention_3
  # moe_implementation: triton # for MoE models
data:
  datasets:
    - path: /data/train.jsonl
      type: tokenized
      max_seq_len: 4096
  select_columns: [input_ids, labels]
  sample_packing_method: sequential
  sample_packing_sequence_len: 4096
train:
  output_dir: outputs/my_run
  data_parallel_mode: fsdp2
  micro_batch_size: 1
  gradient_accumulation_steps: 4
  num_train_epochs: 1
  optimizer: adamw
  lr: 1e-5
  lr_warmup_ratio: 0.05
  lr_decay_style: cosine
  weight_decay: 0.01
  max_grad_norm: 1.0
  enable_mixed_precision: true
  enable_gradient_checkpointing: true
  enable_full_shard: true
  init_device: meta
  load_weights_mode: broadcast
  save_steps: 500
  ckpt_manager: dcp
""",
    "a model of the hub": "model:\n  model_path: Qwen/Qwen3-8B\n",
    "meta device": """
train:
  init_device: meta
  load_weights_mode: broadcast # rank 0 reads, all ranks receive via NCCL
""",
    "full sharding": """
train:
  data_parallel_mode: fsdp2
  enable_full_shard: true # shard params + grads + optimizer states
  data_parallel_shard_size: 8 # GPUs per shard group (default: world_size)
  data_parallel_replicate_size: 1 # data replicas (HSDP when > 1)
""",
    "hybrid sharding": """
train:
  data_parallel_shard_size: 8 # shard within 8-GPU node
  data_parallel_replicate_size: 4 # 4 node replicas
""",
    "packing": """
data:
  sample_packing_method: sequential # or multipack (better packing, slower)
  sample_packing_sequence_len: 8192 # target packed length per step
""",
    "truncation": """
data:
  datasets:
    - path: data.jsonl
      type: tokenized
      max_seq_len: 4096 # truncate individual samples to 4096 before packing
""",
    "adamw": """
train:
  optimizer: adamw
  lr: 1e-5
  weight_decay: 0.01
  lr_warmup_ratio: 0.05
  lr_decay_style: cosine # constant, linear, cosine
""",
    "muon": """
train:
  optimizer: muon
  lr: 1e-4 # Muon base LR (for non-matrix params, uses AdamW)
  muon_lr: 2e-4 # Muon LR for matrix params
  muon_momentum: 0.95
  muon_ns_steps: 5 # Newton-Schulz iterations
""",
    "checkpoints": """
train:
  ckpt_manager: dcp
  save_steps: 500 # save every N steps (0 = off)
  save_epochs: 0.5 # save every N epochs (fractional OK)
  output_dir: outputs/my_run # checkpoints saved here
  load_checkpoint_path: "" # resume from this path (empty = from scratch)
  save_hf_weights: false # save HF-format weights (expensive for large models)
""",
    "recomputation": """
train:
  enable_gradient_checkpointing: true
  recompute_modules: [self_attn, mlp] # selective recompute
""",
    "recomputation of experts": "train:\n  moe_checkpoint_method: moe_act\n",
    "logging": """
train:
  log_format: structured # key=value lines for parsing, or progress_bar (tqdm)
  use_wandb: true
  wandb_project: my_project
  wandb_name: qwen3_8b_ft
  wandb_log_interval: 10 # log every N steps
""",
    "offloading": """
train:
  enable_activation_offload: true
  activation_gpu_limit: 4.0 # keep up to 4 GB of activations on GPU
""",
}
"""Blocks of the documents on local training. Most are parts of a file."""

TRAIN_COMMANDS = (
    "torchrun --nproc_per_node=8 -m xorl.cli.train config.yaml",
    "torchrun --nproc_per_node=8 -m xorl.cli.train config.yaml --train.lr 2e-5"
    " --train.output_dir outputs/my_run --train.pipeline_parallel_size 4"
    " --model.attn_implementation flash_attention_4 --data.sample_packing_sequence_len 16384"
    " --lora.enable_lora true --lora.lora_rank 32",
    "torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=HEAD_IP"
    " --master_port=29500 -m xorl.cli.train config.yaml",
)

SERVER_COMMANDS = (
    "python -m xorl.server.launcher --mode auto --config config.yaml",
    "python -m xorl.server.launcher --mode auto --config config.yaml"
    " --server.pipeline_parallel_size 2 --server.expert_parallel_size 4"
    " --server.output_dir /shared/outputs --server.log_level DEBUG",
    "python -m xorl.server.launcher --mode auto --config config.yaml --server.lora_rank=8",
)

ERNIEKIT_REQUIRED: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "output_dir": "output",
    "logging_steps": 1,
    "train_dataset_path": "examples/data/sft-train.jsonl",
    "max_steps": 100,
    "num_train_epochs": 1,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_seq_len": 8192,
    "learning_rate": 3e-5,
    "warmup_steps": 10,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "sharding_parallel_degree": 1,
    "sharding": "stage1",
    "save_steps": 100,
}

ERNIEKIT_RECOMMENDED: dict[str, str] = {
    "tensor_parallel_config": "sync_param sync_grad sync_moment",
    "pipeline_parallel_config": "disable_partial_send_recv enable_clear_every_step_cache"
    " enable_delay_scale_loss enable_overlap_p2p_comm best_unbalanced_scheduler",
    "sharding_parallel_config": "enable_stage1_overlap enable_release_grads",
    "amp_custom_white_list": "lookup_table flash_attn matmul",
    "amp_custom_black_list": "reduce_sum elementwise_div",
}

ERNIEKIT_DEFAULTS: dict[str, Any] = {
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout_warmup_steps": 0},
    **{"do_eval": False, "disable_tqdm": False, "continue_training": True},
    **{"eval_dataset_prob": "1.0", "eval_dataset_type": "erniekit"},
    **{"evaluation_strategy": "steps", "max_evaluate_steps": 1},
    **{"train_dataset_prob": "1.0", "train_dataset_type": "erniekit", "weight_decay": 0.0},
    **{"seed": 42, "lr_scheduler_type": "linear", "min_lr": 0.0, "layerwise_lr_decay_bound": 1.0},
    **{"random_shuffle": True, "num_cycles": 0.5, "lr_end": 1e-7, "power": 1.0},
    **{"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8},
    **{"tensor_parallel_output": True, "virtual_pp_degree": 1, "add_tail_layers": 0},
    **{"sequence_parallel": True, "moe_group": "dummy"},
    **{"release_grads": False, "use_sparse_head_and_loss_fn": False},
    **{"use_fused_head_and_loss_fn": False, "use_attn_mask_start_row_indices": True},
    **{"recompute_use_reentrant": False, "recompute": False, "recompute_granularity": "full"},
    **{"offload_optim": False, "unified_checkpoint": True, "unified_checkpoint_config": ""},
    **{"disable_ckpt_quant": False, "ignore_save_lr_and_optim": False},
    **{"ignore_load_lr_and_optim": False, "save_total_limit": None},
    **{"use_flash_attention": True, "use_sparse_flash_attn": True, "fuse_rope": False},
    **{"fuse_linear": False, "greedy_intokens": True, "dataloader_num_workers": 1},
    **{"distributed_dataloader": 0, "moe_multimodal_dispatch_use_allgather": "v2-alltoall-unpad"},
    **{"bf16": False, "fp16_opt_level": "O1", "scale_loss": 32768, "amp_master_grad": False},
    **{"num_samples_each_epoch": 6_000_000},
    **{"lora_rank": 8, "lora_alpha": -1, "rslora": False, "lora_plus_scale": 1},
    **{"rslora_plus": False, "lora": False},
    **{"beta": 0.1, "simpo_gamma": 0.5, "offset_alpha": 0.0, "max_prompt_len": 2048},
    **{"loss_type": "sigmoid", "pref_loss_ratio": 1.0, "sft_loss_ratio": 0.0},
    **{"label_smoothing": 0.0, "reference_free": False, "ref_model_update_steps": -1},
    **{"apply_hadamard": True, "use_lowprecision_moment": False},
    **{"tensorwise_offload_optimizer": False, "apply_online_actscale_step": 200},
    **{"optim_shard_num": 1, "save_strategy": "no"},
}

NXDT_TRAINER = """
name: hf_llama
model_source: hf
seed: 1234
trainer:
  devices: 32
  num_nodes: 1
  max_epochs: -1
  max_steps: 20000
  log_every_n_steps: 1
  val_check_interval: 20000
  check_val_every_n_epoch: null
  num_sanity_val_steps: 0
  limit_val_batches: 1
  limit_test_batches: 1
  gradient_clip_val: 1.0
  lnc: 2
"""

NXDT_MANAGER = """
exp_manager:
  log_local_rank_0_only: True
  create_tensorboard_logger: True
  explicit_log_dir: null
  exp_dir: null
  name: megatron_llama
  resume_if_exists: True
  resume_ignore_no_checkpoint: True
  create_checkpoint_callback: True
  checkpoint_callback_params:
    monitor: step
    save_top_k: 1
    mode: max
    save_last: False
    filename: 'megatron_llama--{step}-{consumed_samples}'
    every_n_train_steps: 200
  log_parameter_norm: True
  log_gradient_norm: True
  enable_recovery_time_instrumentation: False
  save_xser: True
  load_xser: True
  async_checkpointing: False
  resume_from_checkpoint: null
"""

NXDT_STRATEGY = """
distributed_strategy:
  tensor_model_parallel_size: 8
  pipeline_model_parallel_size: 1
  virtual_pipeline_model_parallel_size: 1
  zero1: True
  sequence_parallel: True
  kv_replicator: 4
"""

NXDT_DATA = """
data:
  micro_batch_size: 1
  global_batch_size: 1024
"""

NXDT_HF_MODEL = """
model:
  # model architecture
  model_config: /models/config.json
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 4
  hidden_size: 4096
  qkv_linear: False

  # Miscellaneous
  use_cpu_initialization: True

  ## Activation Checkpointing
  activations_checkpoint_granularity: selective
  activations_checkpoint_recompute: [CoreAttention]

  fusions:
    softmax: True
    flash_attention: False

  do_layer_norm_weight_decay: False

  optim:
    name: adamw_fp32OptState
    lr: 3e-4
    weight_decay: 0.01
    capturable: False
    betas:
    - 0.9
    - 0.999
    sched:
      name: LinearAnnealingWithWarmUp
      warmup_steps: 100
      max_steps: ${trainer.max_steps}
"""

NXDT_MEGATRON_MODEL = """
model:
  # model architecture
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  num_kv_heads: 32
  init_method_std: 0.021
  hidden_dropout: 0
  attention_dropout: 0
  ffn_dropout: 0
  apply_query_key_layer_scaling: True
  normalization: 'rmsnorm'
  layernorm_epsilon: 1e-5
  do_layer_norm_weight_decay: False # True means weight decay on all params
  make_vocab_size_divisible_by: 8 # Pad the vocab size to be divisible by this value.
  persist_layer_norm: True # Use of persistent fused layer norm kernel.
  share_embeddings_and_output_weights: False # Untie embedding and output layer weights.
  position_embedding_type: 'rope' # Position embedding type. Options ['learned_absolute', 'rope]
  rotary_percentage: 1 # If using position_embedding_type=rope
  activation: 'swiglu' # ['swiglu', 'gelu']
  has_bias: False
  # Miscellaneous
  use_cpu_initialization: True

  ## Activation Checkpointing
  activations_checkpoint_granularity: selective # 'selective' or 'full'

  fusions:
    softmax: True
    flash_attention: False # Use NKI flash attention

  optim:
    name: adamw
    lr: 3e-4
    weight_decay: 0.1
    capturable: True
    betas:
    - 0.9
    - 0.95
    sched:
      name: CosineAnnealing
      warmup_steps: 2000
      constant_steps: 0
      min_lr: 3.0e-5
"""

NXDT_PRECISION = """
precision:
  type: 'mixed_precision' # ['bf16SR', 'fp32', 'autocast', 'mixed_precision', 'manual']
  # Set the following only if precision type is manual, otherwise they will be automatically set.
  master_weights: False
  fp32_grad_acc: False
  xla_use_bf16: '0'
  xla_downcast_bf16: '0'
  neuron_rt_stochastic_rounding_en: '0'
  parallel_layers_reduce_dtype: 'bf16'
"""

NXDT_ALIGNED_DATA = {
    "data.train_dir": "/example_datasets/llama3_8b/training.jsonl",
    "data.val_dir": None,
    "data.dev_choose_samples": 2250,
    "data.seq_length": 4096,
    "model.weight_init_only": True,
}
NXDT_DPO = {
    f"model_alignment_strategy.dpo.{name}": value
    for name, value in {
        "kl_beta": 0.01,
        "loss_type": "sigmoid",
        "max_dpo_prompt_length": 2048,
        "precompute_ref_log_probs": True,
        "truncation_mode": "keep_start",
    }.items()
}
NXDT_SFT = {"model_alignment_strategy.sft.packing": True}

NXDT_DEFAULTS: dict[str, Any] = {
    "trainer.lnc": None,
    "trainer.log_every_n_steps": 1,
    **{
        f"exp_manager.{name}": value
        for name, value in {
            "log_local_rank_0_only": False,
            "create_tensorboard_logger": False,
            "explicit_log_dir": None,
            "resume_if_exists": False,
            "resume_ignore_no_checkpoint": False,
            "log_parameter_norm": False,
            "log_gradient_norm": False,
            "enable_recovery_time_instrumentation": False,
            "save_xser": False,
            "load_xser": False,
            "async_checkpointing": False,
            "resume_from_checkpoint": None,
        }.items()
    },
    "model.fuse_qkv": True,
    "data.dev_choose_samples": None,
}
