"""The models that benchmarks/predict_gpu.py predicts and then runs; benchmarks/gpu.py takes its GPT from here, too."""
