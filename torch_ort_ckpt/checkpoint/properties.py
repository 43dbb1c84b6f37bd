"""Names of the properties with a defined meaning, for all file formats.

ORTTrainer, TrainingRunner and partitioned sets keep their counters and options under different names; here each has one.
"""

from __future__ import annotations

STEP = "step"
"""Batches trained on (`train_step_info/step` of ORTTrainer, `step` of TrainingRunner)."""

WEIGHT_UPDATE_STEP = "weight_update_step"
"""Optimizer steps taken (`train_step_info/optimization_step` of ORTTrainer, `weight_update_step` of TrainingRunner)."""

ROUND = "round"
"""Completed epochs."""

TRAINING_DATA_SET_INDEX = "training_data_set_index"
"""Index of the next file of the training data."""

LOSS_SCALER_STATE = "loss_scaler_state"
"""Loss scale and the steps it has been stable for, as TrainingRunner writes them: "65536 12"."""

OPTIMIZER_NAME = "optimizer_name"
"""The optimizer's operator: AdamOptimizer, LambOptimizer, SGDOptimizer."""

MIXED_PRECISION = "mixed_precision"
"""1 if the weights in the files are masters of half-precision ones, else 0."""

USER_DICT = "user_dict"
"""ORTTrainer's user dict: the hex of a pickle, never unpickled unless requested."""

WORLD_RANK = "world_rank"
WORLD_SIZE = "world_size"
DATA_PARALLEL_SIZE = "data_parallel_size"
HORIZONTAL_PARALLEL_SIZE = "horizontal_parallel_size"
PIPELINE_PARALLEL_SIZE = "pipeline_parallel_size"
ZERO_STAGE = "zero_stage"

RANK = (WORLD_RANK, WORLD_SIZE, DATA_PARALLEL_SIZE, HORIZONTAL_PARALLEL_SIZE, PIPELINE_PARALLEL_SIZE, ZERO_STAGE)
"""Properties of a rank in a partitioned set; a whole state has none of these."""

LAMB = "LambOptimizer"
ADAM = "AdamOptimizer"
SGD = "SGDOptimizer"
