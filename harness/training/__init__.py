"""Training an MoE language model with any registered implementation: `moebench train`.

`model` is the transformer, `experts` puts a plugin's layer into it, `data` hands out tokens, `loop` trains under
FSDP-2, `processes` joins the others, `checkpoints` stops and continues, `log` keeps the curves, `costs` counts what a
step computes, `rows` writes what came of it. `pairs` compares two implementations, `projection` carries steps over to
many GPUs, `power` says what losses of few seeds can tell.
"""
