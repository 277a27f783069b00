"""Tests of what holds across stages. Each stage's own tests lie in its folder, so that they travel with it."""
