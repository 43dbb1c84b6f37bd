"""Rewrites of graphs, one in each file. Each keeps the mathematics.

A pass is a function that takes an `onnx.ModelProto`, changes it in place and returns how many places it changed (`Pass` in `pipelines.py`).
What else it needs comes after the model. Callers copy a model that must stay as it is (`description.copy_of`).

- Before ORT's gradient builder: `transpose_axes`, `optional_outputs`, `cast_like`, `instance_norm`, `identity_transpose`, `versions`.
- After it: `batch_norm_order`, `gradient_buffers`, `pool_shapes`, `convolution_gradient`, `average_pool_gradient`, `split_gradient`,
  `where_gradient`, `padding_gradient`.
- For eval graphs: `single_batch_norm_outputs`, `versions`.
- For running on ORT: `dimensions`, the ones for gradients again (other tools make artifacts too), `direct_gradients`, `direct_updates`,
  `unbiased_variance`, `label_guards`, `optimizer_flag`, `versions`.
- For joint graphs made by PyTorch, to be faster: `max_pool_indices`, `transpose_pairs`, `kept_dimensions`, `matrix_products`,
  `unused_nodes`. Always: `sequence_splits`, `identity_transpose`.
- For other uses of an exported graph: `initializer_names`, `running_statistics`, `keep_outputs`.

`pipelines.py` has the order; `rewriting.py`, `declared_shapes.py`, `padding_amounts.py` and `onnx_ir_models.py` are the tools.

To add one: a file here whose docstring says which graphs need it and why, its place in `pipelines.py`, its name in this list, and
`tests/graphs/passes/test_<file>.py` with the smallest graph that needs it.
"""
