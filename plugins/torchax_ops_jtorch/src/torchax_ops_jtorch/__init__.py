"""The op pack of torch functions and composite ops that run better whole than decomposed. Found through pack.py."""
