"""Export of a run's model in the forms of other programs: Hugging Face, torch.export, ONNX."""
