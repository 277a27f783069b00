"""Tests of this stage. They import relatively, so that the folder is the same in every stage that they hold for."""
