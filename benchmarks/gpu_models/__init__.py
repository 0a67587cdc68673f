"""The models that benchmarks/predict_gpu.py predicts and then runs."""
