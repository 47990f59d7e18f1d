# SPDX-License-Identifier: LGPL-2.1-or-later
"""
Types of global variables
-------------------------

By default, :manpage:`pahole(1)` writes the types of per-CPU variables only to BTF. This table has
the types of the other variables that drgn's helpers and the readers of this project use. A test
compares each entry with the DWARF of every test kernel.

A variable whose type changed has several entries: the first one whose types the kernel has is
used. If types do not decide, a function decides from the variable. The length of an array is a
number, an enumerator, or one of

``MAX_NUMNODES``, ``NR_CPUS``
    macros, found from types
``*``
    as many elements as fit before the next symbol: this may be a few too many
``+``
    the same, without elements at the end that are all zero
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from drgn import FaultError, Program, Type, sizeof

__all__ = ("VARIABLES", "Variable", "type_of")


class Variable(Protocol):
    """
    Variable whose type is looked up.

    :ivar prog: program that it is in
    :ivar address: its address
    :ivar room: bytes to the next symbol; ``None`` if not known
    """

    @property
    def prog(self) -> Program: ...

    @property
    def address(self) -> int: ...

    @property
    def room(self) -> int | None: ...


Entry = str | Callable[[Variable], str]


def _mem_section(variable: Variable) -> str:
    # A pointer with CONFIG_SPARSEMEM_EXTREME, else a large array of all sections.
    if variable.room is not None and variable.room > 4096:
        return "struct mem_section [*][1]"
    return "struct mem_section **"


def _stats_index(variable: Variable) -> str:
    # Signed in 6.10 and 6.11, where no value is negative. Unsigned since 6.12, with 0xFF for items
    # that are not kept, of which every kernel has some.
    length = _length(variable, "MEMCG_NR_STAT")
    has_none = 0xFF in variable.prog.read(variable.address, length)
    return f"{'u8' if has_none else 's8'} [{length}]"


def _kfence_metadata(variable: Variable) -> str:
    # An array until commit cabdf74e6b31 ("mm: kfence: allocate kfence_metadata at runtime")
    # (in v6.6), which also added kfence_metadata_init.
    try:
        variable.prog.symbol("kfence_metadata_init")
    except LookupError:
        return "struct kfence_metadata [*]"
    return "struct kfence_metadata *"


def _map_types(variable: Variable) -> str:
    # The length is the largest configured type plus 1, which no enumerator has.
    types = variable.prog.type("enum bpf_map_type").enumerators or ()
    known = [e.value for e in types if e.name != "__MAX_BPF_MAP_TYPE"]
    length = min(max(known) + 1, (variable.room or 1 << 16) // sizeof(variable.prog.type("long")))
    return f"const struct bpf_map_ops * const [{length}]"


def _stack_pools(variable: Variable) -> str:
    # An array until its length became a parameter of the kernel's command line.
    return "void *[8192]" if variable.room is None or variable.room > 4096 else "void **"


# Variables that the readers of this project use.
_READERS: dict[str, Entry | tuple[Entry, ...]] = {
    # memcontrol, vmstats
    "cgroup_roots": "struct list_head",
    "cgroup_subsys": "struct cgroup_subsys *[CGROUP_SUBSYS_COUNT]",
    "cgrp_dfl_root": "struct cgroup_root",
    "css_serial_nr_next": "u64",
    "mem_cgroup_idr": "struct idr",
    "mem_cgroup_ids": "struct xarray",
    "mem_cgroup_private_ids": "struct xarray",
    "mem_cgroup_stats_index": _stats_index,
    "memcg_bpf_enabled_key": "struct static_key_false",
    "memcg_kmem_enabled_key": "struct static_key_false",
    "memcg_kmem_online_key": "struct static_key_false",
    "memcg_list_lrus": "struct list_head",
    "memcg_sockets_enabled_key": "struct static_key_false",
    "memcg_vm_event_stat": "const unsigned int [+]",
    "memory_stats": "const struct memory_stat [+]",
    "memory_cgrp_subsys": "struct cgroup_subsys",
    "memory_cgrp_subsys_enabled_key": "struct static_key_true",
    "root_mem_cgroup": "struct mem_cgroup *",
    "stats_flush_threshold": "atomic_t",
    # released
    "bpf_map_types": _map_types,
    # hugetlb, hugetlb_cgroup
    "hugetlb_cgrp_subsys": "struct cgroup_subsys",
    "hugetlb_cgrp_subsys_enabled_key": "struct static_key_true",
    "hugetlb_lock": "spinlock_t",
    # workqueue
    "worker_pool_idr": "struct idr",
    # backing_dev
    "offline_cgwbs": "struct list_head",
    # memremap
    "pgmap_array": "struct xarray",
    # registers of CPUs that a crash stopped
    "crash_notes": ("note_buf_t *", "unsigned int *"),
    # slab
    "slab_caches": "struct list_head",
    "slab_obj_ext_has_codetag_key": "struct static_key_false",
    "slab_state": "enum slab_state",
    # percpu
    "pcpu_atom_size": "int",
    "pcpu_base_addr": "void *",
    "pcpu_chunk_lists": "struct list_head *",
    "pcpu_chunk_struct_size": "size_t",
    "pcpu_first_chunk": "struct pcpu_chunk *",
    "pcpu_free_slot": "int",
    "pcpu_nr_empty_pop_pages": "int",
    "pcpu_nr_groups": "int",
    "pcpu_nr_populated": "unsigned long",
    "pcpu_nr_slots": "int",
    "pcpu_nr_units": "int",
    "pcpu_reserved_chunk": "struct pcpu_chunk *",
    "pcpu_sidelined_slot": "int",
    "pcpu_to_depopulate_slot": "int",
    "pcpu_unit_map": "int *",
    "pcpu_unit_offsets": "unsigned long *",
    "pcpu_unit_pages": "int",
    "pcpu_unit_size": "int",
    # vmalloc
    "kho_in": "struct kho_in",
    "nr_vmalloc_pages": "atomic_long_t",
    "vm_module_tags": "struct vm_struct *",
    # zswap, swap
    "nr_swapfiles": "unsigned int",
    "swap_cgroup_ctrl": "struct swap_cgroup_ctrl [*]",
    "nr_zswap_trees": "unsigned int [*]",
    "swap_info": "struct swap_info_struct *[*]",
    "zswap_enabled": "bool",
    "zswap_entry_cache": "struct kmem_cache *",
    "zswap_list_lru": "struct list_lru",
    "zswap_next_shrink": "struct mem_cgroup *",
    "zswap_pools": "struct list_head",
    "zswap_pools_count": "atomic_t",
    # struct zswap_tree before 6.10.
    "zswap_trees": ("struct zswap_tree *[*]", "struct xarray *[*]"),
    # alloc_tag, page_ext
    "alloc_tag_cttype": "struct codetag_type *",
    "alloc_tag_ref_mask": "unsigned long",
    "alloc_tag_ref_offs": "int",
    "kernel_tags": "struct alloc_tag_kernel_section",
    "mem_alloc_profiling_key": ("struct static_key_false", "struct static_key_true"),
    "mem_profiling_compressed": "struct static_key_false",
    "mem_profiling_support": "bool",
    "module_tags": "struct alloc_tag_module_section",
    "page_alloc_tagging_ops": "struct page_ext_operations",
    "page_ext_size": "unsigned long",
    # physical addresses
    "atomic_pool_dma": ("struct dma_gen_pool", "struct gen_pool *"),
    "atomic_pool_dma32": ("struct dma_gen_pool", "struct gen_pool *"),
    "atomic_pool_kernel": ("struct dma_gen_pool", "struct gen_pool *"),
    "io_tlb_default_mem": "struct io_tlb_mem",
    "iomem_resource": "struct resource",
    # ftrace, bio_integrity
    "ftrace_pages_start": "struct ftrace_page *",
    "ftrace_trace_arrays": "struct list_head",
    "integrity_buf_pool": "mempool_t",
    "savedcmd": "struct saved_cmdlines_buffer *",
    "temp_buffer": "struct trace_buffer *",
    # slub_large
    "pack_list": "struct list_head",
    "serial8250_reg": "struct uart_driver",
    # kfence
    "__kfence_pool": "char *",
    "kfence_metadata": _kfence_metadata,
    # pgtable, rss
    "fault_around_bytes": "unsigned long",
    "huge_zero_pfn": "unsigned long",
    "percpu_counter_batch": "int",
    "pgd_list": "struct list_head",
    "boot_cpu_data": "struct cpuinfo_x86",
    "cgroup_mutex": "struct mutex",
    # sockets
    "proto_list": "struct list_head",
    "raw_v4_hashinfo": "struct raw_hashinfo",
    "tcp_hashinfo": "struct inet_hashinfo",
    "tcp_prot": "struct proto",
    "tcp_sockets_allocated": "struct percpu_counter",
    "tcpv6_prot": "struct proto",
    "udp_prot": "struct proto",
    "udp_table": "struct udp_table",
    "udplite_table": "struct udp_table",
}

# Variables that drgn's helpers use, by module.
_DRGN: dict[str, Entry | tuple[Entry, ...]] = {
    # block, device, pci, sysfs
    "block_class": "struct class",
    "blockdev_superblock": "struct super_block *",
    "bus_kset": "struct kset *",
    "bus_ktype": "struct kobj_type",
    "cdev_map": "struct kobj_map *",
    "chrdevs": "struct char_device_struct *[255]",
    "class_kset": "struct kset *",
    "class_ktype": "struct kobj_type",
    "device_ktype": "struct kobj_type",
    "driver_ktype": "struct kobj_type",
    "major_names": "struct blk_major_name *[255]",
    "memory_subsys": "struct bus_type",
    "module_ktype": "struct kobj_type",
    "pci_bus_type": "struct bus_type",
    "pci_root_buses": "struct list_head",
    "sections_per_block": "int",
    "sysfs_root_kn": "struct kernfs_node *",
    # bpf
    "btf_idr": "struct idr",
    "btf_modules": "struct list_head",
    "link_idr": "struct idr",
    "map_idr": "struct idr",
    "prog_idr": "struct idr",
    # cpumask, nodemask, percpu
    "__cpu_active_mask": "struct cpumask",
    "__cpu_online_mask": "struct cpumask",
    "__cpu_possible_mask": "struct cpumask",
    "__cpu_present_mask": "struct cpumask",
    "__per_cpu_offset": "unsigned long [NR_CPUS]",
    "node_states": "nodemask_t [NR_NODE_STATES]",
    "nr_cpu_ids": "unsigned int",
    "nr_node_ids": "unsigned int",
    # fs, ipc, kernfs, net, pid, user
    "init_ipc_ns": "struct ipc_namespace",
    "init_net": "struct net",
    "init_pid_ns": "struct pid_namespace",
    "init_user_ns": "struct user_namespace",
    "init_uts_ns": "struct uts_namespace",
    "ipc_mni_shift": "int",
    "net_namespace_list": "struct list_head",
    "ns_file_operations": "struct file_operations",
    "poll_spurious_irq_timer": "struct timer_list",
    "super_blocks": "struct list_head",
    "uidhash_table": "struct hlist_head [128]",
    "userspace_init_fs": "struct fs_struct *",
    # irq, printk, timekeeping
    "ioport_resource": "struct resource",
    "irq_desc_tree": "struct xarray",
    "jiffies_64": "u64",
    "nr_irqs": "int",
    "prb": "struct printk_ringbuffer *",
    "shadow_timekeeper": "struct timekeeper",
    "sparse_irqs": "struct maple_tree",
    "timekeeper_data": "struct tk_data [TIMEKEEPERS_MAX]",
    "tk_core": "struct tk_data",
    "total_nr_irqs": "unsigned int",
    # mm, mmzone, vmstat, swap, hugetlb
    "__highest_present_section_nr": "unsigned long",
    "_totalram_pages": "atomic_long_t",
    "contig_page_data": "struct pglist_data",
    "hstates": "struct hstate [*]",
    "hugetlb_max_hstate": "int",
    "init_mm": "struct mm_struct",
    "max_low_pfn": "unsigned long",
    "max_mapnr": "unsigned long",
    "max_pfn": "unsigned long",
    "mem_map": "struct page *",
    "mem_section": _mem_section,
    "memblock": "struct memblock",
    "min_low_pfn": "unsigned long",
    "node_data": "struct pglist_data *[MAX_NUMNODES]",
    "nr_swap_pages": "atomic_long_t",
    "nr_swapper_spaces": "unsigned int [*]",
    "nr_vmap_nodes": "unsigned int",
    "page_offset_base": "unsigned long",
    "saved_command_line": "char *",
    "stack_pools": _stack_pools,
    "swapper_spaces": "struct address_space *[*]",
    "sysctl_overcommit_kbytes": "unsigned long",
    "sysctl_overcommit_ratio": "int",
    "total_swap_pages": "long",
    "vm_committed_as": "struct percpu_counter",
    "vm_node_stat": "atomic_long_t [NR_VM_NODE_STAT_ITEMS]",
    "vm_numa_event": "atomic_long_t [NR_VM_NUMA_EVENT_ITEMS]",
    "vm_zone_stat": "atomic_long_t [NR_VM_ZONE_STAT_ITEMS]",
    "vmap_area_list": "struct list_head",
    "vmap_area_root": "struct rb_root",
    "vmap_nodes": "struct vmap_node *",
    "vmap_zone_size": "unsigned int",
    # module, panic, sched, slab
    "avenrun": "unsigned long [3]",
    "crashing_cpu": "int",
    "init_task": "struct task_struct",
    "mod_tree": "struct mod_tree_root",
    "modules": "struct list_head",
    "panic_cpu": "atomic_t",
    "root_task_group": "struct task_group",
    "slab_kset": "struct kset *",
    "taint_flags": "struct taint_flag [+]",
    "tainted_mask": "unsigned long",
    "task_state_array": "const char *[+]",
    "task_struct_cachep": "struct kmem_cache *",
    "workqueues": "struct list_head",
}

VARIABLES = _READERS | _DRGN


def type_of(name: str, variable: Variable) -> Type | None:
    """
    Return the type of a variable.

    :return: ``None`` if the variable is not in the table, or the kernel has none of its types
    :raises drgn.FaultError: if memory that decides cannot be read
    """
    entries, fault = VARIABLES.get(name, ()), None
    for entry in entries if isinstance(entries, tuple) else (entries,):
        try:
            text = entry if isinstance(entry, str) else entry(variable)
            return _type(variable, text)
        except FaultError as error:
            fault = error
        except (LookupError, ArithmeticError, TypeError, ValueError):
            continue  # a damaged type or length, too
    if fault is not None:
        raise fault
    return None


def _type(variable: Variable, text: str) -> Type:
    bare, _, lengths = text.partition("[")
    numbers = re.findall(r"\[([^]]+)\]", f"[{lengths}") if lengths else []
    type_ = variable.prog.type(bare.strip())
    for length in reversed(numbers):
        type_ = variable.prog.array_type(type_, _length(variable, length, type_))
    return type_


def _length(variable: Variable, text: str, element: Type | None = None) -> int:
    prog = variable.prog
    if text.isdigit():
        return int(text)
    if text == "MAX_NUMNODES":
        return _max_numnodes(prog)
    if text == "NR_CPUS":
        bits = 8 * sizeof(prog.type("struct cpumask"))
        return int(min(bits, (variable.room or 8 * bits) // sizeof(prog.type("unsigned long"))))
    if text not in ("*", "+"):
        return int(prog.constant(text).value_())
    if element is None or variable.room is None:
        raise LookupError("the length of the array is not known")
    size = int(sizeof(element))
    length = variable.room // size
    if text == "+":
        data = prog.read(variable.address, length * size)
        length = -(-len(data.rstrip(b"\0")) // size)
    return length


def _max_numnodes(prog: Program) -> int:
    # A macro. These members are arrays of that length.
    for name, member in (
        ("struct kmem_cache", "per_node"),
        ("struct kmem_cache", "node"),
        ("struct hstate", "nr_huge_pages_node"),
    ):
        for found in prog.type(name).members or ():
            if found.name == member and found.type.length:
                return int(found.type.length)
    raise LookupError("MAX_NUMNODES is not known")
