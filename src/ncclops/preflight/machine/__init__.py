"""What this machine says of itself, under a root. The only part of preflight that touches it.

files          regular files below the root, each bounded, none waited for
host_reader, nic_reader, gpu_reader, kernel_log_reader    what is read, part by part
reader         the process that reads: one request a line, one answer a line
collective     a short all_reduce between the GPUs, where one was asked for
reading        starts such processes, and gives up those that are late
"""
