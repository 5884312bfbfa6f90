"""The figures of a run: scalars for files and TensorBoard, live progress, the hardware, and reports of them."""
