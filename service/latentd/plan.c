/* SPDX-License-Identifier: Apache-2.0 */
#include "service/latentd/plan.h"

#include <errno.h>
#include <string.h>

int plan_make(uint64_t rows, uint32_t heads, uint32_t ranks, uint32_t row_tile, WirePlan *ret) {
        uint64_t tiles, tile = 0;
        uint32_t used, head = 0;
        WireHeader header;

        if (rows == 0 || heads == 0 || ranks == 0 || ranks > WIRE_RANKS_MAX || row_tile == 0)
                return -EINVAL;

        tiles = (rows - 1) / row_tile + 1;
        used = tiles < ranks ? (uint32_t) tiles : ranks;

        header = ret->header;
        memset(ret, 0, sizeof(*ret));
        ret->header = header;
        ret->ranks = ranks;
        ret->row_tile = row_tile;
        ret->chunks = 1;

        for (uint32_t i = 0; i < ranks; i++) {
                /* The first ones take one more where it does not divide; ranks beyond `used` get nothing, at
                 * the end. */
                if (i < used) {
                        tile += tiles / used + (i < tiles % used);
                        head += heads / used + (i < heads % used);
                }

                ret->rows[i].begin = i > 0 ? ret->rows[i - 1].end : 0;
                ret->rows[i].end = tile == tiles ? rows : tile * row_tile;
                ret->heads[i].begin = i > 0 ? ret->heads[i - 1].end : 0;
                ret->heads[i].end = head;
        }

        return 0;
}
