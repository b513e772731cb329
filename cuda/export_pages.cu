// export_pages: what attention kernels want, from the table: padded page table and CSR.
#include "common.cuh"

// rows: int32 (requests,). indptr: int32 (requests + 1,), from 0, pages of each request.
// lengths: int32 (requests,), tokens. Any of the outputs may be null.
// page_table: int32 (requests, width), padded with 0; indices: int32 (indptr[requests],);
// last_page_len: int32 (requests,), 0 for a request without tokens.
extern "C" __global__ void export_pages(
    const i32* slots, i64 row_width, i32 page_size, i32 requests, const i32* rows,
    const i32* indptr, const i32* lengths, i32* page_table, i32 width, i32* indices,
    i32* indptr_out, i32* last_page_len) {
    i64 stride = static_cast<i64>(gridDim.x) * blockDim.x;
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (page_table) {
        i64 cells = static_cast<i64>(requests) * width;
        for (i64 at = first; at < cells; at += stride) {
            i32 r = static_cast<i32>(at / width);
            i32 page = static_cast<i32>(at - static_cast<i64>(r) * width);
            i64 entry = static_cast<i64>(rows[r]) * row_width + static_cast<i64>(page) * page_size;
            page_table[at] = page < indptr[r + 1] - indptr[r] ? slots[entry] / page_size : 0;
        }
    }
    if (indices) {
        i32 total = indptr[requests];
        for (i64 at = first; at < total; at += stride) {
            i32 r = insertion(indptr, 0, requests, static_cast<i32>(at)) - 1;
            i64 page = at - indptr[r];
            indices[at] = slots[static_cast<i64>(rows[r]) * row_width + page * page_size] / page_size;
        }
    }
    for (i64 r = first; r <= requests; r += stride) {
        if (indptr_out) indptr_out[r] = indptr[r];
        if (last_page_len && r < requests) {
            i32 pages = indptr[r + 1] - indptr[r];
            last_page_len[r] = pages ? lengths[r] - (pages - 1) * page_size : 0;
        }
    }
}
