"""Training an MoE language model with any registered implementation: `moebench train`.

`model` is the transformer, `experts` puts a plugin's layer into it, `data` hands out tokens, `loop` trains under
FSDP-2, `checkpoints` stops and continues it, `costs` counts what a step computes, `rows` writes what came of it.
"""
