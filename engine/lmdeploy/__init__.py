"""LMDeploy's PyTorch engine as the backend: it generates, featcache gives it every image's features."""
