"""The second family: a Qwen 3.5 target, whose layers are mostly gated-delta ones, and its DFlash drafter."""
