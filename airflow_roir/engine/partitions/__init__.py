"""Attaches and detaches partitions, and repairs indexes after partitions came or went without roir."""
