"""The model of a run in the forms of other programs: Hugging Face, torch.export, ONNX."""
