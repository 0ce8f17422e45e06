"""What a model is judged by: training losses, evaluation metrics, and evaluation of a split."""
