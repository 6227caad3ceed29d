use oscar_kernels_cpu::*;
use std::time::Instant;
fn main(){ let pool=ThreadPool::new(2).unwrap();
 let spin=|us:u64|{ let t=Instant::now(); let mut n=0u64; while t.elapsed().as_micros()<us as u128 { n+=1; } std::hint::black_box(n); };
 for us in [5u64,20,100,1000,10000] { let t=Instant::now(); let main=std::thread::current().id(); let other=std::sync::atomic::AtomicUsize::new(0); let rounds=(200000/us).min(2000);
  for _ in 0..rounds { pool.run(8,&|_|{ spin(us); if std::thread::current().id()!=main { other.fetch_add(1,std::sync::atomic::Ordering::Relaxed); } }); }
  println!("{us} us tasks x8: {:.1} us a run, share of worker {:.2}", t.elapsed().as_secs_f64()*1e6/rounds as f64, other.into_inner() as f64/(8*rounds) as f64); } }
