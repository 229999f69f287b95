/* SPDX-License-Identifier: Apache-2.0 */
#include "service/media/sheet.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "service/media/encode.h"
#include "service/media/resample.h"
#include "service/shared/cleanup.h"

#define GREY 32

uint64_t sheet_frame(uint64_t frames, uint32_t cell, uint32_t n) {
        return n > 1 ? (frames - 1) * cell / (n - 1) : frames / 2;
}

/* Places of the cells. */
typedef struct Sheet {
        uint32_t columns, cells; /* with a frame */
        uint32_t cell_width, cell_height, width, height;
} Sheet;

static Sheet place_cells(const MediaWrite *m) {
        uint32_t most = SHEET_SIDE / m->sheet_columns, rows;
        Sheet s = {.columns = m->sheet_columns, .cells = m->sheet_columns * m->sheet_rows};

        if (s.cells > m->frames)
                s.cells = (uint32_t) m->frames;
        if (s.columns > s.cells)
                s.columns = s.cells;
        s.cell_width = m->width < most ? m->width : most;
        s.cell_height = (uint32_t) (((uint64_t) m->height * s.cell_width + m->width / 2) / m->width);
        if (s.cell_height == 0)
                s.cell_height = 1;
        if (s.cell_height > SHEET_SIDE)
                s.cell_height = SHEET_SIDE;
        rows = (s.cells + s.columns - 1) / s.columns;
        s.width = s.columns * (s.cell_width + SHEET_GAP) - SHEET_GAP;
        s.height = rows * (s.cell_height + SHEET_GAP) - SHEET_GAP;
        return s;
}

static int take_cell(const MediaWrite *m, const uint8_t *frame, const Sheet *s, uint32_t cell,
        uint8_t *scratch, uint8_t *picture) {
        const ResampleCrop whole = {0, 0, s->cell_width, s->cell_height};
        uint32_t x = cell % s->columns * (s->cell_width + SHEET_GAP),
                 y = cell / s->columns * (s->cell_height + SHEET_GAP);
        int r;

        r = resample_rgb(frame, m->width, m->height, s->cell_width, s->cell_height, &whole, scratch);
        if (r < 0)
                return r;

        for (uint32_t i = 0; i < s->cell_height; i++)
                memcpy(picture + ((size_t) (y + i) * s->width + x) * 3,
                        scratch + (size_t) i * s->cell_width * 3, (size_t) s->cell_width * 3);
        return 0;
}

static int take_frames(const MediaWrite *m, const uint8_t *arena, Channel *c, const Sheet *s,
        uint8_t *scratch, uint8_t *picture, Fault *f) {
        uint64_t bytes = (uint64_t) m->width * m->height * 3;
        uint32_t cell = 0;
        int r;

        for (uint64_t i = 0; i < m->frames; i++) {
                r = channel_wait_frame(c, i, f);
                if (r < 0)
                        return r;
                if (cell < s->cells && sheet_frame(m->frames, cell, s->cells) == i) {
                        const uint8_t *frame = arena + m->frames_offset + i % m->ring_frames * bytes;

                        r = take_cell(m, frame, s, cell++, scratch, picture);
                        if (r < 0)
                                return fault_set(
                                        f, r, FAULT_DOES_NOT_FIT, "Not enough memory for a contact sheet.");
                }
                channel_taken(c, i + 1);
                channel_progress(c, i + 1, m->frames);
        }
        return 0;
}

int sheet_run(const MediaWrite *m, int fd, const uint8_t *arena, Channel *c, MediaDone *ret, Fault *f) {
        CLEANUP_FREE uint8_t *picture = NULL, *scratch = NULL;
        Channel whole = {
                .socket = -1, .frames = 1, .ring_frames = 1, .ready = 1, .taken = 1, .taken_said = 1};
        Sheet s = place_cells(m);
        MediaWrite png = *m;
        int r;

        picture = malloc((size_t) s.width * s.height * 3);
        scratch = malloc((size_t) s.cell_width * s.cell_height * 3);
        if (!picture || !scratch)
                return fault_set(f, -ENOMEM, FAULT_DOES_NOT_FIT, "Not enough memory for a contact sheet.");
        memset(picture, GREY, (size_t) s.width * s.height * 3);

        r = take_frames(m, arena, c, &s, scratch, picture, f);
        if (r < 0)
                return r;

        png.width = s.width;
        png.height = s.height;
        png.frames = png.ring_frames = 1;
        png.frames_offset = 0;
        return encode_run(&png, fd, picture, &whole, ret, f);
}
