# SPDX-License-Identifier: LGPL-2.1-or-later
"""Data of a user in slab memory: nothing of the kernel follows what stands there."""

from __future__ import annotations

from drgn import Program, cast, container_of, sizeof
from drgn.helpers.linux.idr import idr_for_each
from drgn.helpers.linux.list import list_for_each_entry

IPC_MSG_IDS = 1
PAGE = 4096


def part_of_message(prog: Program, least: int) -> int:
    """
    Find the second part of a System V message: a ``struct msg_msgseg``, and data of a user.

    :param least: the least number of bytes of these data
    :return: ``struct msg_msgseg *``
    """
    for _, entry in idr_for_each(prog["init_ipc_ns"].ids[IPC_MSG_IDS].ipcs_idr):
        permissions = cast("struct kern_ipc_perm *", entry)
        messages = container_of(permissions, "struct msg_queue", "q_perm").q_messages
        for message in list_for_each_entry("struct msg_msg", messages.address_of_(), "m_list"):
            in_first = PAGE - sizeof(message.type_.type)  # DATALEN_MSG
            if message.next and message.m_ts.value_() - in_first >= least:
                return int(message.next)
    raise LookupError("no message has a second part")
