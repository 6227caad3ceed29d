//! Checks of what ranks of a model exchange: sums of simulated ranks, and NCCL with a group of one.

use crate::{Numbers, Report, download, upload, without_cache};
use anyhow::Result;
use oscar_backend::{Backend, Communicator, Step};
use oscar_kernels_cuda::{CudaBackend, CudaError, NcclId, NcclRank, sum_ranks};

pub fn check(gpu: &CudaBackend, report: &mut Report) -> Result<()> {
    let mut numbers = Numbers::new(1700);
    for ranks in [1, 2, 3, 8] {
        for count in [1, 255, 4096, 100_003] {
            let parts: Vec<f32> = numbers.vector(ranks * count).into_iter().map(|v| v * 1.37).collect();
            let (from, to) =
                (gpu.device().upload_new(&parts, "parts")?, gpu.device().alloc(4 * count, "sums")?);
            sum_ranks(gpu.device(), gpu.kernels(), from.slice(), to.slice())?;
            let mut found = vec![0.0f32; count];
            gpu.device().download(to.slice(), &mut found)?;
            let expected = |i: usize| (1..ranks).fold(parts[i], |sum, rank| sum + parts[rank * count + i]);
            let differing = (0..count).filter(|&i| found[i].to_bits() != expected(i).to_bits()).count();
            report.case("sums over ranks", differing as f64, 0.0, || {
                format!("{count} values of {ranks} ranks")
            });
        }
    }
    match NcclId::new() {
        Ok(id) => alone(id, &mut numbers, report),
        Err(CudaError::MissingLibrary { .. }) => {
            report.case("NCCL, not installed here", 0.0, 0.0, String::new);
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

/// A group of one rank gets back what it gave.
fn alone(id: NcclId, numbers: &mut Numbers, report: &mut Report) -> Result<()> {
    let gpu = crate::open()?;
    let rank = NcclRank::join(gpu.device(), id, 0, 1)?;
    let name = format!("NCCL {} with one rank", rank.version());
    for count in [1, 5, 4096] {
        let values = numbers.vector(count);
        let mut summed = values.clone();
        rank.all_reduce(&mut summed)?;
        let mut seen = Vec::new();
        rank.all_gather(&values, &mut |rank, part| seen.push((rank, part.to_vec())))?;
        let differs = summed != values || seen != [(0, values)];
        report.case(&name, f64::from(u8::from(differs)), 0.0, || format!("{count} values"));
    }
    let gpu = gpu.with_ranks(rank);
    for (rows, width) in [(1, 64), (7, 130), (300, 1000)] {
        let values = numbers.vector(rows * width);
        let mut whole = gpu.rows(width);
        let mut x = upload(&gpu, &values, width)?;
        without_cache(&gpu, |step| {
            step.all_reduce(&mut x)?;
            Ok(step.all_gather(&x, &mut whole)?)
        })?;
        let differs = download(&gpu, &x, rows)? != values || download(&gpu, &whole, rows)? != values;
        report.case(&name, f64::from(u8::from(differs)), 0.0, || format!("{rows} rows of {width} in a step"));
    }
    Ok(())
}
