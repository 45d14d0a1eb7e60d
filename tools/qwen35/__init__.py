"""What `tools/train_qwen35_nano.py` is made of: a small Qwen 3.5 target and its DFlash drafter, trained on a CPU."""
